import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.utils import get_model_config

from nemo_edo.generation import megatron_engine
from nemo_edo.megatron.decoding_cache import PromptCacheContext
from nemo_edo.types import GenerationRequest, SamplingParams

STOPS = range(1, 12)
"""So many that some responses finish and others do not."""
LENGTH = 8


@pytest.fixture
def engine(tiny, policy):
    return tiny.build_engine(policy, stop_ids=STOPS)


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Three samples each of nine prompts of one to eleven tokens, two of which begin with another prompt."""
    rng = random.Random(0)
    prompts = [tuple(rng.choices(range(12, 128), k=k)) for k in (11, 4, 1, 7, 2, 4, 5)]
    prompts += [prompts[1] + (20,), prompts[4] + (30, 40, 50)]
    return [GenerationRequest(f"problem-{number}", sample, prompt, seed=100 * number + sample)
            for number, prompt in enumerate(prompts) for sample in range(3)]


def params(temperature: float = 1.0, top_p: float = 1.0, max_new_tokens: int = LENGTH) -> SamplingParams:
    return SamplingParams(temperature, top_p, max_new_tokens)


def responses(rollouts) -> list[tuple[int, ...]]:
    return [tuple(rollout.response_ids) for rollout in rollouts]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_full_forward_pass(engine, tiny, tiny_qwen2, requests, temperature, top_p):
    dense = tiny.load_dense(tiny_qwen2)
    for rollout in engine.generate(requests, params(temperature, top_p)):
        tokens = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
        with torch.no_grad():
            expected = tiny.dense_logprobs(dense, tokens, temperature)[0][0, len(rollout.prompt_ids) - 1 :]
        torch.testing.assert_close(torch.tensor(rollout.response_logprobs), expected, rtol=0, atol=1e-4)


def test_the_engine_samples_from_the_current_weights(tiny, policy, engine, requests, tmp_path):
    own = policy.snapshot()
    other = tiny.write_tiny_model(tmp_path / "other", seed=1)
    tokens_before = responses(engine.generate(requests, params(0.0)))
    try:
        policy.load(tiny.build_policy(other).snapshot())
        found = engine.generate(requests, params(0.0))
    finally:
        policy.load(own)
    assert responses(found) == [greedy(tiny.load_dense(other), request.prompt_ids) for request in requests]
    assert responses(found) != tokens_before


@torch.no_grad()
def greedy(model, prompt) -> tuple[int, ...]:
    """The most likely token step by step, each from a whole forward pass."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + LENGTH:
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] in STOPS:
            break
    return tuple(tokens[len(prompt) :])


def test_decoding_computes_logits_of_last_positions_alone(engine, requests, monkeypatch):
    outputs, through_stages = [], megatron_engine.through_stages
    monkeypatch.setattr(megatron_engine, "through_stages", lambda *a: outputs.append(through_stages(*a)) or outputs[-1])
    engine.generate(requests, params(max_new_tokens=2))
    assert {logits.shape[1] for logits in outputs} == {1}


@pytest.mark.parametrize("threshold", [0.0, 0.9], ids=["when the cache is full", "as they end"])
def test_waiting_requests_take_the_places_of_rows_that_ended(tiny, policy, requests, monkeypatch, threshold):
    """Of two rows one decodes twelve tokens, and meanwhile the other all further requests, of two tokens each."""
    monkeypatch.setattr(megatron_engine, "COMPACT_BELOW", threshold)
    asked = [replace(request, max_new_tokens=2) for request in requests[::3]]
    asked = sorted(asked[:7], key=lambda request: len(request.prompt_ids))
    asked[0] = replace(asked[0], max_new_tokens=12)
    expected = tiny.build_engine(policy, stop_ids=[128]).generate(asked, params())
    caches, through_stages = [], megatron_engine.through_stages
    monkeypatch.setattr(megatron_engine, "through_stages", lambda *a: caches.append(type(a[3])) or through_stages(*a))
    found = tiny.build_engine(policy, stop_ids=[128], max_batch_size=2).generate(asked, params())
    assert responses(found) == responses(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.response_logprobs == pytest.approx(other.response_logprobs, abs=1e-5)
    assert caches.count(PromptCacheContext) == 12 or not threshold, "batches of two would take 12 + 2 + 2 + 2 steps"


def test_a_response_depends_on_its_prompt_and_seed_and_not_on_order_or_other_requests(engine, requests):
    expected = dict(zip(requests, responses(engine.generate(requests, params())), strict=True))
    for others in (random.Random(1).sample(requests, len(requests)), requests[1::5]):
        assert responses(engine.generate(others, params())) == [expected[request] for request in others]
    same = [replace(requests[0], sample_index=index, seed=seed) for index, seed in enumerate([5, 6, 5, 7, 8, 9])]
    found = responses(engine.generate(same, params()))
    assert found[0] == found[2] and len(set(found)) == 5


def test_padding_of_the_vocabulary_is_never_sampled(tiny, policy, requests):
    """As if tensor parallelism had padded the output layer: columns from vocab_size on do not exist."""
    narrow = SimpleNamespace(chunks=policy.built.chunks, vocab_size=20)
    engine = tiny.build_engine(SimpleNamespace(built=narrow, device=policy.device))
    assert max(max(response) for response in responses(engine.generate(requests, params()))) < 20


@pytest.mark.parametrize("size", ["context_parallel_size", "expert_model_parallel_size"])
def test_context_and_expert_parallelism_are_refused(tiny, policy, monkeypatch, size):
    monkeypatch.setattr(get_model_config(policy.chunks[0]), size, 2)
    with pytest.raises(ValueError, match="context nor expert"):
        tiny.build_engine(policy)


@pytest.mark.parametrize(("stop", "max_batch_size"), [(("7",), 64), (("3 1", "00"), 5), (("5 ",), 64)])
def test_stop_strings_cut_the_same_responses(tiny, policy, engine, requests, stop, max_batch_size):
    """Each is the beginning of the response without them, up to the token that completes the string."""
    small = tiny.build_engine(policy, stop_ids=STOPS, max_batch_size=max_batch_size)
    whole = engine.generate(requests, params())
    found = small.generate(requests, replace(params(), stop=stop))
    for one, other in zip(found, whole, strict=True):
        spoken = list(other.response_ids[:-1] if other.finished else other.response_ids)
        texts = [" ".join(map(str, spoken[:length])) for length in range(1, len(spoken) + 1)]
        met = next((length for length, text in enumerate(texts, 1) if any(s in text for s in stop)), None)
        assert one.response_ids == other.response_ids[:met]
        assert len(one.response_logprobs) == len(one.response_ids)
        assert one.finished == (other.finished and met is None)
        assert (one.stop is not None) == (met is not None)
        assert one.stop is None or (one.stop in one.text and one.text == texts[met - 1])
    ended = {(rollout.finished, rollout.stop is not None) for rollout in found}
    assert {(False, True), (True, False)} <= ended, "both kinds are to be tested"


def test_a_requests_own_limit_cuts_its_response_and_no_other(engine, requests):
    whole = responses(engine.generate(requests, params()))
    limits = [1 + place % 11 for place in range(len(requests))]  # some of them above the common one
    own = [replace(request, max_new_tokens=limit) for request, limit in zip(requests, limits, strict=True)]
    longer, found = engine.generate(requests, params(max_new_tokens=11)), engine.generate(own, params())
    for one, other, limit in zip(found, longer, limits, strict=True):
        assert one.response_ids == other.response_ids[:limit]
        assert one.finished == (other.finished and len(other.response_ids) <= limit)
    mixed = engine.generate([own[0], *requests[1:]], params())
    assert responses(mixed) == [whole[0][: limits[0]], *whole[1:]]
