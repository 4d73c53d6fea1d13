"""A policy over several ranks: each share's results return to their rows, those of its other ranks nowhere."""

from types import SimpleNamespace

import pytest
import torch

from nemo_edo.config import MicroBatchConfig
from nemo_edo.data.batching import build_batch
from nemo_edo.data.shares import InputShapes, cut
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams
from nemo_edo.worker import remote
from nemo_edo.worker.dispatch import Workers
from nemo_edo.worker.remote import RemoteEngine, RemotePolicy
from nemo_edo.worker.worker import Place

PLACES = [Place(share, answers, 1, {}) for share, answers in ((0, False), (0, True), (1, True), (1, False))]
"""Of two data-parallel shares with two ranks each."""


class Ranks(Workers):
    """Ranks whose results ``find`` makes, here, of a rank's number and its part of a call."""

    size = len(PLACES)

    def __init__(self, find) -> None:
        super().__init__()
        self.find = find
        self.local.model = SimpleNamespace(shares=lambda batch: cut(batch, MicroBatchConfig(2), 2, InputShapes()))

    def call(self, work, *given, each, own=None, news=None) -> list:
        self.news = news
        return [self.find(rank, each[rank]) if place.answers else None for rank, place in enumerate(PLACES)]


@pytest.mark.parametrize("tokens", [remote.TOKENS_OF_A_CALL, 20])
def test_values_return_to_their_rows_in_one_call_and_in_several(monkeypatch, tokens: int):
    monkeypatch.setattr(remote, "TOKENS_OF_A_CALL", tokens)
    batch = build_batch([((1, 2), [10 * row + place for place in range(2 + row)]) for row in range(5)], pad_id=0)

    def find(rank, share):
        own = share.rows.tokens[:, 1:] * share.rows.mask
        return torch.stack([own, -own])

    logprobs, entropies = RemotePolicy(Ranks(find), PLACES).logprobs(batch)
    expected = batch.tokens[:, 1:] * batch.mask
    assert logprobs.equal(expected) and entropies.equal(-expected)


def test_responses_return_to_their_requests_and_arrive_as_they_end():
    asked = [GenerationRequest(f"p-{place}", 0, (place, place + 1), seed=place) for place in range(5)]
    arrived: list[Rollout] = []

    def find(rank, requests):
        found = [Rollout(one.problem_id, 0, (), [one.seed], [-1.0], "", True, 0, one.seed) for one in requests]
        for place in (1, 0, 2)[: len(found)]:  # as they end
            ranks.news(rank, ([place], [found[place]]))

    ranks = Ranks(find)
    engine = RemoteEngine(RemotePolicy(ranks, PLACES))
    engine.policy_version = 3
    rollouts = engine.generate(asked, SamplingParams(1.0, 1.0, 8), SimpleNamespace(add=arrived.extend))
    for found, requests in ((rollouts, asked), (arrived, [asked[place] for place in (2, 0, 4, 3, 1)])):
        told = [(one.problem_id, one.prompt_ids, [*one.response_ids], one.policy_version) for one in found]
        assert told == [(one.problem_id, one.prompt_ids, [one.seed], 3) for one in requests]
