"""The vocabulary split over two gloo processes: this file, run again as each of them, saves its side."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nemo_edo.parallel import vocab_parallel_log_probs_and_entropy

PROCESSES, COLUMNS = 2, 6
CASES = {
    "no padding": {},
    "padding in the second half": {"vocab_size": 9, "temperature": 0.8},
    "the second half all padding": {"vocab_size": COLUMNS},
    "without entropy": {"with_entropy": False},
    "half precision": {"dtype": torch.bfloat16},
}


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


def process_main(process: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=process, world_size=PROCESSES,
        timeout=timedelta(seconds=60),
    )
    results = {name: run_case(process, dist.group.WORLD, **options) for name, options in CASES.items()}
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
    expected = run_case(0, None, **CASES[name])
    parts = [results[name] for results in split_results]
    for value in expected.keys() - {"gradient"}:
        assert torch.equal(parts[0][value], parts[1][value]), f"the processes disagree on {value}"
        torch.testing.assert_close(parts[0][value], expected[value])
    torch.testing.assert_close(torch.cat([part["gradient"] for part in parts], dim=-1), expected["gradient"])


if __name__ == "__main__":
    process_main(int(sys.argv[1]), sys.argv[2])
