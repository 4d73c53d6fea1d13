"""A cache that stores each prompt once, compared with one in which every row has a copy."""

import random

import pytest

from nemo_edo.generation import megatron_engine
from nemo_edo.megatron.decoding_cache import PromptCacheContext
from nemo_edo.types import GenerationRequest, SamplingParams


@pytest.mark.parametrize(("model_type", "groups"), [("qwen2", 2), ("qwen3", 4), ("llama", 2)])
@pytest.mark.parametrize("threshold", [0.0, 1.1], ids=["rows stay", "ended rows leave at every step"])
def test_responses_are_those_of_a_copy_of_the_prompt_for_each(
    tiny, tmp_path, monkeypatch, model_type: str, groups: int, threshold: float
):
    """Of prompts of one length and of several, which begin alike, with as many samples of each and not."""
    folder = tiny.write_tiny_model(tmp_path / "model", model_type, num_key_value_heads=groups)
    engine = tiny.build_engine(tiny.build_policy(folder), stop_ids=range(1, 12))
    monkeypatch.setattr(megatron_engine, "COMPACT_BELOW", threshold)
    generator, made = random.Random(0), []
    build = PromptCacheContext.__init__
    monkeypatch.setattr(PromptCacheContext, "__init__", lambda *a: made.append(0) or build(*a))
    for lengths, samples in (((9, 9, 9), (4, 4, 4)), ((9, 9, 5), (6, 1, 3)), ((3, 12), (7, 7))):
        beginning = generator.choices(range(12, 128), k=3)
        prompts = [tuple(beginning[: n - 1] + generator.choices(range(12, 128), k=max(1, n - 3))) for n in lengths]
        requests = [GenerationRequest(f"p-{n}", i, prompt, seed=100 * n + i)
                    for n, (prompt, count) in enumerate(zip(prompts, samples, strict=True)) for i in range(count)]
        found = {}
        for shares in (True, False):
            engine._shares_prompts = shares
            found[shares] = engine.generate(requests, SamplingParams(1.0, 1.0, 8))
        assert len(made) == 1, "the first of the two reads prompts that are stored once"
        made.clear()
        assert [one.response_ids for one in found[True]] == [one.response_ids for one in found[False]]
        assert len({len(one.response_ids) for one in found[True]}) > 1
        for one, other in zip(found[True], found[False], strict=True):
            assert one.response_logprobs == pytest.approx(other.response_logprobs, abs=1e-5)
    modules = [module for chunk in engine.built.chunks for module in chunk.modules()]
    assert {module.prompts for module in modules if hasattr(module, "softmax_scale")} == {None}, "prompts are kept"
