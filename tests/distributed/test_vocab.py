"""The vocabulary split over two gloo processes: this file, run again as each of them, saves its side."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nemo_edo.parallel import linear, linear_log_probs_and_entropy, vocab_parallel_log_probs_and_entropy

PROCESSES, COLUMNS = 2, 6
CASES = {
    "no padding": {},
    "padding in the second half": {"vocab_size": 9, "temperature": 0.8},
    "the second half all padding": {"vocab_size": COLUMNS},
    "without entropy": {"with_entropy": False},
    "half precision": {"dtype": torch.bfloat16},
}
FUSED = [name for name in CASES if name != "half precision"]
"""Cases of the fused head: the same logits, as products of hidden states and output weights."""


def run_case(process: int, group: dist.ProcessGroup | None, dtype: torch.dtype = torch.float64, **options) -> dict:
    """Values and the logits' gradient for this process's columns, or for all of them where there is no group."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(4, 7, PROCESSES * COLUMNS, generator=generator, dtype=torch.float64)
    targets = torch.randint(options.get("vocab_size", PROCESSES * COLUMNS), (4, 7), generator=generator)
    coefficients = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64)
    start = process * COLUMNS
    columns = slice(None) if group is None else slice(start, start + COLUMNS)
    logits = logits[..., columns].to(dtype).requires_grad_()
    logprobs, entropies = vocab_parallel_log_probs_and_entropy(
        logits, targets, vocab_start=start, group=group, **options
    )
    results = {"logprobs": logprobs} if entropies is None else {"logprobs": logprobs, "entropies": entropies}
    loss = sum((coefficients[index] * result).sum() for index, result in enumerate(results.values()))
    loss.backward()
    return {**{name: result.detach() for name, result in results.items()}, "gradient": logits.grad}


def run_fused_case(process: int, group: dist.ProcessGroup | None, **options) -> dict:
    """As ``run_case``; the hidden states' gradient is summed over the processes, as Megatron's layers do."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 7, 3, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(PROCESSES * COLUMNS, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(options.get("vocab_size", PROCESSES * COLUMNS), (4, 7), generator=generator)
    coefficients = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64)
    start = process * COLUMNS
    weight = weight[slice(None) if group is None else slice(start, start + COLUMNS)].requires_grad_()
    logprobs, entropies = linear_log_probs_and_entropy(
        hidden, weight, targets, vocab_start=start, group=group, **options
    )
    results = {"logprobs": logprobs} if entropies is None else {"logprobs": logprobs, "entropies": entropies}
    sum((coefficients[index] * result).sum() for index, result in enumerate(results.values())).backward()
    if group is not None:
        dist.all_reduce(hidden.grad, group=group)
    values = {name: result.detach() for name, result in results.items()}
    return {**values, "hidden gradient": hidden.grad, "gradient": weight.grad.T}


def process_main(process: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=process, world_size=PROCESSES,
        timeout=timedelta(seconds=60),
    )
    linear.BLOCK_ELEMENTS, linear.MIN_COLUMNS = {"cpu": 1}, 4  # two blocks on each process
    results = {name: run_case(process, dist.group.WORLD, **options) for name, options in CASES.items()}
    results |= {f"fused, {name}": run_fused_case(process, dist.group.WORLD, **CASES[name]) for name in FUSED}
    torch.save(results, f"{folder}/{process}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def split_results(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("vocab")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(process), str(folder)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for process in range(PROCESSES)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * PROCESSES, "\n".join(outputs)
    return [torch.load(folder / f"{process}.pt") for process in range(PROCESSES)]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_two_processes_are_those_of_the_unsplit_vocabulary(split_results, name):
    assert_parts_of([results[name] for results in split_results], run_case(0, None, **CASES[name]))


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_head_of_two_processes_is_that_of_the_unsplit_vocabulary(split_results, name):
    parts = [results[f"fused, {name}"] for results in split_results]
    assert_parts_of(parts, run_fused_case(0, None, **CASES[name]))


def assert_parts_of(parts: list[dict], expected: dict) -> None:
    """Every process has the same values and hidden states' gradients, and its own columns' gradient."""
    for value in expected.keys() - {"gradient"}:
        assert torch.equal(parts[0][value], parts[1][value]), f"the processes disagree on {value}"
        torch.testing.assert_close(parts[0][value], expected[value])
    torch.testing.assert_close(torch.cat([part["gradient"] for part in parts], dim=-1), expected["gradient"])


if __name__ == "__main__":
    process_main(int(sys.argv[1]), sys.argv[2])
