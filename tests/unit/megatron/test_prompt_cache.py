"""A cache that holds each prompt once, against one in which every row has its own."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.generation import megatron_engine
from nemo_edo.megatron.prompt_cache import CacheContext, CachedPrompts, PromptCacheContext, PromptRows
from nemo_edo.types import GenerationRequest, SamplingParams

STOPS = range(1, 12)
MODELS = {"qwen2": {}, "qwen3": {"num_key_value_heads": 4}, "llama": {}}


@st.composite
def owners(draw) -> tuple[torch.Tensor, int]:
    prompts = draw(st.integers(1, 5))
    return torch.tensor(draw(st.lists(st.integers(0, prompts - 1), min_size=1, max_size=12))), prompts


@given(owners())
def test_rows_come_back_from_their_prompts_in_their_order(case):
    owner, prompts = case
    rows, values = PromptRows.of(owner, prompts), torch.randn(len(owner), 3)
    grouped = rows.by_prompt(values)
    assert grouped.shape == (prompts, torch.bincount(owner).max(), 3)
    assert torch.equal(rows.by_row(grouped), values)
    for prompt in range(prompts):
        mine = values[owner == prompt]
        assert torch.equal(grouped[prompt, : len(mine)], mine)


def test_rows_that_stand_in_order_with_as_many_for_each_prompt_are_not_moved():
    assert PromptRows.of(torch.tensor([0, 0, 1, 1, 2, 2]), 3).places is None
    assert PromptRows.of(torch.tensor([0, 1, 0, 1]), 2).places is not None
    assert PromptRows.of(torch.tensor([0, 0, 1]), 2).places is not None


@given(owners(), st.integers(1, 3), st.integers(1, 2))
def test_scores_and_contexts_are_those_of_a_copy_for_each_row(case, groups: int, queries: int):
    owner, prompts = case
    keys, values = torch.randn(2, prompts, groups, 7, 4, dtype=torch.float64)
    cached = CachedPrompts(keys, values, PromptRows.of(owner, prompts))
    asked = torch.randn(len(owner), groups, queries, 4, dtype=torch.float64)
    scores = cached.scores(asked)
    torch.testing.assert_close(scores, asked @ keys[owner].transpose(-1, -2))
    torch.testing.assert_close(cached.context(scores), scores @ values[owner])


def filled_context(rows: int) -> CacheContext:
    """Two layers' cache of 3 tokens, with room for 5."""
    context = CacheContext(max_batch_size=rows, max_sequence_length=5)
    for layer in (1, 2):
        context.key_value_memory_dict[layer] = (torch.randn(5, rows, 2, 4), torch.randn(5, rows, 2, 4))
    context.sequence_len_offset = 3
    return context


def test_the_cache_behind_prompts_has_room_for_what_follows_them_alone():
    prompts = filled_context(2)
    behind = PromptCacheContext(prompts, torch.tensor([0, 1, 1, 0]), length=8)
    assert (behind.prefix, behind.sequence_len_offset) == (3, 0)
    assert (behind.max_sequence_length, behind.max_batch_size) == (8, 4)
    for layer, (keys, values) in prompts.key_value_memory_dict.items():
        assert [part.shape for part in behind.key_value_memory_dict[layer]] == [(5, 4, 2, 4)] * 2
        assert torch.equal(behind.cached_prompts(layer).keys, keys[:3].permute(1, 2, 0, 3))
        assert torch.equal(behind.cached_prompts(layer).values, values[:3].permute(1, 2, 0, 3))


def test_rows_that_are_kept_keep_their_prompt_and_their_cache():
    behind = PromptCacheContext(filled_context(2), torch.tensor([0, 1, 1, 0]), length=8)
    behind.sequence_len_offset = 2
    before = {layer: [part.normal_()[:2].clone() for part in parts] for layer, parts in
              behind.key_value_memory_dict.items()}
    behind.keep(torch.tensor([1, 3]))
    assert behind.max_batch_size == 2
    for layer, parts in behind.key_value_memory_dict.items():
        assert all(torch.equal(part[:2], was[:, [1, 3]]) for part, was in zip(parts, before[layer], strict=True))
        assert behind.cached_prompts(layer).rows.owner.tolist() == [1, 0]


def test_a_row_may_be_kept_more_than_once():
    context = filled_context(2)
    before = context.key_value_memory_dict[2][1][:3].clone()
    context.keep(torch.tensor([1, 1, 0]))
    assert torch.equal(context.key_value_memory_dict[2][1][:3], before[:, [1, 1, 0]])


@pytest.fixture(params=MODELS)
def engine(request, tiny, tmp_path):
    folder = tiny.write_tiny_model(tmp_path / "model", request.param, **MODELS[request.param])
    return tiny.build_engine(tiny.build_policy(folder), stop_ids=STOPS)


@pytest.mark.parametrize("threshold", [0.0, 1.1], ids=["rows stay", "ended rows leave at every step"])
def test_responses_are_those_of_a_copy_of_the_prompt_for_each(engine, monkeypatch, threshold: float):
    """Of prompts of one length and of several, which begin alike, with as many samples of each and not."""
    monkeypatch.setattr(megatron_engine, "COMPACT_BELOW", threshold)
    draw, made = random.Random(0), []
    build = PromptCacheContext.__init__
    monkeypatch.setattr(PromptCacheContext, "__init__", lambda *a: made.append(0) or build(*a))
    for lengths, samples in (((9, 9, 9), (4, 4, 4)), ((9, 9, 5), (6, 1, 3)), ((3, 12), (7, 7))):
        beginning = draw.choices(range(12, 128), k=3)
        prompts = [tuple(beginning[: n - 1] + draw.choices(range(12, 128), k=max(1, n - 3))) for n in lengths]
        requests = [GenerationRequest(f"p-{n}", i, prompt, seed=100 * n + i)
                    for n, (prompt, count) in enumerate(zip(prompts, samples, strict=True)) for i in range(count)]
        found = {}
        for shares in (True, False):
            engine._shares_prompts = shares
            found[shares] = engine.generate(requests, SamplingParams(1.0, 1.0, 8))
        assert len(made) == 1, "the first of the two reads prompts that are held once"
        made.clear()
        assert [one.response_ids for one in found[True]] == [one.response_ids for one in found[False]]
        assert len({len(one.response_ids) for one in found[True]}) > 1
        for one, other in zip(found[True], found[False], strict=True):
            assert one.response_logprobs == pytest.approx(other.response_logprobs, abs=1e-5)


def test_nothing_of_the_prompts_is_held_by_the_model_afterwards(engine):
    requests = [GenerationRequest("p-0", sample, (12, 13, 14), seed=sample) for sample in range(4)]
    engine.generate(requests, SamplingParams(1.0, 1.0, 4))
    modules = [module for chunk in engine._built.chunks for module in chunk.modules()]
    assert {module.prompts for module in modules if hasattr(module, "softmax_scale")} == {None}
