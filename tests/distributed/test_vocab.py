"""The vocabulary split over two gloo processes."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nemo_edo.parallel import linear_logprobs_and_entropy, vocab_parallel_logprobs_and_entropy

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

PROCESSES, COLUMNS, HIDDEN = 2, 6, 3
OPTIONS = {
    "no padding": {},
    "padding in the second half": {"vocab_size": 9, "temperature": 0.8},
    "the second half all padding": {"vocab_size": COLUMNS},
}
CASES = {(head, name): options for head in ("logits", "fused") for name, options in OPTIONS.items()}


def run_case(head: str, rank: int, group: dist.ProcessGroup | None, **options) -> dict:
    """Values and gradients of this rank's columns, or of all of them where there is no group.

    Of the logits or, fused, of the output weights that they are products with; the hidden states' gradient is then
    summed over the ranks, as Megatron's layers do.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    whole = random(PROCESSES * COLUMNS, HIDDEN) if head == "fused" else 5 * random(PROCESSES * COLUMNS, 4, 7)
    hidden, coefficients = random(4, 7, HIDDEN).requires_grad_(), random(2, 4, 7)
    targets = torch.randint(options.get("vocab_size", PROCESSES * COLUMNS), (4, 7), generator=generator)
    start = rank * COLUMNS
    columns = slice(None) if group is None else slice(start, start + COLUMNS)
    settings = {"vocab_start": start, "group": group, **options}
    own = whole[columns].clone().requires_grad_()
    if head == "fused":
        found = linear_logprobs_and_entropy(hidden, own, targets, **settings)
    else:
        found = vocab_parallel_logprobs_and_entropy(own.permute(1, 2, 0).contiguous(), targets, **settings)
    values = dict(zip(("logprobs", "entropies"), found, strict=True))
    sum((weights * value).sum() for weights, value in zip(coefficients, found, strict=True)).backward()
    results = {**{name: value.detach() for name, value in values.items()}, "gradient": own.grad}
    if head == "fused":
        if group is not None:
            dist.all_reduce(hidden.grad, group=group)
        results["hidden gradient"] = hidden.grad
    return results


def split_results() -> dict[tuple, dict]:
    """This rank's part of every case; the fused head works in two blocks on each rank."""
    with mock.patch.multiple("nemo_edo.parallel.logprobs", BLOCK_ELEMENTS={"cpu": 1}, MIN_COLUMNS=4):
        return {(head, name): run_case(head, dist.get_rank(), dist.group.WORLD, **options)
                for (head, name), options in CASES.items()}


def test_values_and_gradients_of_two_processes_are_those_of_the_unsplit_vocabulary(two):
    """Every process has the same values and hidden states' gradients, and its columns' gradient."""
    found = two.run("distributed.test_vocab:split_results")
    for case, options in CASES.items():
        expected, parts = run_case(case[0], 0, None, **options), [results[case] for results in found]
        for value in expected.keys() - {"gradient"}:
            assert torch.equal(parts[0][value], parts[1][value]), f"{case}: the processes disagree on {value}"
            torch.testing.assert_close(parts[0][value], expected[value])
        torch.testing.assert_close(torch.cat([part["gradient"] for part in parts]), expected["gradient"])
