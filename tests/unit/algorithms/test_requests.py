"""Requests and the seeds that fix their random numbers."""


import pytest

from nemo_edo.algorithms.requests import group_parts, request_seed, sampling_requests
from nemo_edo.types import Problem

PROBLEMS = [Problem(name, "q", "#### 1", "1", "file:1") for name in ("train-2", "train-1")]
PROMPTS = {"train-1": (1,), "train-2": (2, 3), "train-3": (4,)}


def test_a_samples_seed_does_not_depend_on_how_many_are_sampled_or_on_other_problems():
    few, many = (sampling_requests(problems, PROMPTS, samples, 42, "evaluate")
                 for problems, samples in ((PROBLEMS[:1], 2), (PROBLEMS, 10)))
    assert few == many[:2]


def test_the_seed_of_known_parts_never_changes():
    """Another value would make runs of an earlier version impossible to repeat."""
    assert request_seed(42, "collect", 0, "train-1", 0) == 7213978838430774035


@pytest.mark.parametrize(("size", "parts"), [(1, [3, 3, 3]), (3, [3, 3, 3]), (5, [3, 3, 3]), (6, [6, 3]), (99, [9])])
def test_a_part_never_ends_within_a_problem_s_requests(size, parts):
    problems = [*PROBLEMS, Problem("train-3", "q", "#### 1", "1", "file:1")]
    requests = sampling_requests(problems, PROMPTS, 3, 42)
    found = group_parts(requests, size)
    assert [len(part) for part in found] == parts and sum(found, []) == requests
