"""generation.max_batch_size=auto: as many rows as memory has room for, and the same responses whatever their number."""

import random

import pytest
import torch

from nemo_edo.errors import UserError
from nemo_edo.generation import megatron_engine
from nemo_edo.generation.batch_size import MOST_ON_CPU, of_similar_length, refilled_places, row_bytes, rows_that_fit
from nemo_edo.parallel import free_memory
from nemo_edo.types import GenerationRequest, SamplingParams

CPU = torch.device("cpu")
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=8)


@pytest.fixture
def available(policy, monkeypatch):
    """Sets the bytes that the machine has available."""
    return lambda number: monkeypatch.setattr(free_memory, "available_bytes", lambda: number)


@pytest.mark.parametrize("room", [1, 5, 26, 27])
def test_auto_decodes_as_many_rows_as_half_of_the_free_memory_holds(tiny, policy, available, monkeypatch, room: int):
    rng = random.Random(0)
    prompts = [tuple(rng.choices(range(12, 128), k=k)) for k in (6, 4, 1, 5, 2, 4, 5, 3, 3)]
    requests = [GenerationRequest(f"{p}", s, prompt, 10 * p + s) for p, prompt in enumerate(prompts) for s in range(3)]
    engine = tiny.build_engine(policy, stop_ids=range(1, 12), max_batch_size="auto")
    available(10**12)
    expected, sizes, decoding = engine.generate(requests, SAMPLING), [], megatron_engine._Decoding
    monkeypatch.setattr(megatron_engine, "_Decoding", lambda asked, rows, *a, **more: (
        sizes.append(rows) or decoding(asked, rows, *a, **more)))
    row = row_bytes(engine._layers, prompt=6, response=refilled_places(SAMPLING.max_new_tokens),
                    vocabulary=engine.built.vocab_size, device=CPU)
    available(2 * row * room + 1)
    found = engine.generate(requests, SAMPLING)
    assert sizes == [room]
    assert [one.response_ids for one in found] == [one.response_ids for one in expected]


def test_a_cpu_has_a_cap_of_rows_a_gpu_keeps_a_reserve_and_the_rank_with_the_least_room_decides(available, monkeypatch):
    available(10**15)
    assert rows_that_fit(1000, CPU) == MOST_ON_CPU
    monkeypatch.setattr(free_memory, "free_gpu_memory", lambda: [2 * 2**30 + 10_000_000])
    monkeypatch.setattr(free_memory, "of_each_rank", lambda number, device: [number])
    assert rows_that_fit(1000, torch.device("cuda")) == 9000
    monkeypatch.setattr(free_memory, "free_gpu_memory", lambda: [2**30])
    with pytest.raises(UserError, match="rank 0 has 0 bytes"):
        rows_that_fit(1000, torch.device("cuda"))
    monkeypatch.setattr(free_memory, "free_host_memory", lambda: [1000, 800, 900])
    monkeypatch.setattr(free_memory, "of_each_rank", lambda number, device: [10, 10, 150])
    assert rows_that_fit(10, CPU) == 3
    monkeypatch.setattr(free_memory, "of_each_rank", lambda number, device: [10, 500, 10])
    with pytest.raises(UserError, match="rank 1 has 400 bytes .* needs 500"):
        rows_that_fit(10, CPU)


@pytest.mark.parametrize(("lengths", "fewest", "runs"), [
    ([10] * 100, 1, [100]),
    ([40, 60, 89, 95, 100], 1, [1, 1, 1, 2]),
    ([40, 60, 89, 95, 100], 201, [2, 3]),  # 3 x 100 tokens; the rest, of two prompts, is all there is
    ([], 1, []),
])
def test_prompts_that_are_read_together_are_of_similar_length_or_few(lengths: list[int], fewest: int, runs: list[int]):
    found = [lengths[run] for run in of_similar_length(lengths, fewest)]
    assert [len(run) for run in found] == runs and [length for run in found for length in run] == lengths
