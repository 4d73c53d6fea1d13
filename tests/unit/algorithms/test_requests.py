"""Requests and the seeds that fix their random numbers."""

from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.algorithms.requests import request_seed, sampling_requests
from nemo_edo.types import Problem

PROBLEMS = [Problem(name, "q", "#### 1", "1", "file:1") for name in ("train-2", "train-1")]
PROMPTS = {"train-1": (1,), "train-2": (2, 3), "train-3": (4,)}


def test_requests_go_problem_by_problem_with_their_prompts():
    requests = sampling_requests(PROBLEMS, PROMPTS, 3, 42, "collect", 0)
    assert [(r.problem_id, r.sample_index, r.prompt_ids) for r in requests] == [
        *(("train-2", index, (2, 3)) for index in range(3)), *(("train-1", index, (1,)) for index in range(3))]


def test_a_samples_seed_does_not_depend_on_how_many_are_sampled_or_on_other_problems():
    few, many = (sampling_requests(problems, PROMPTS, samples, 42, "evaluate")
                 for problems, samples in ((PROBLEMS[:1], 2), (PROBLEMS, 10)))
    assert few == many[:2]


def test_the_seed_of_known_parts_never_changes():
    """Another value would make runs of an earlier version impossible to repeat."""
    assert request_seed(42, "collect", 0, "train-1", 0) == 7213978838430774035


parts = st.tuples(st.integers(0, 99), st.sampled_from(["collect", "evaluate"]), st.integers(0, 30),
                  st.sampled_from(["train-1", "train-11", "test-1"]), st.integers(0, 40))


@given(parts, parts)
def test_other_run_seed_purpose_iteration_problem_or_sample_gives_another_seed_of_63_bits(one, other):
    assert (request_seed(*one) == request_seed(*other)) == (one == other)
    assert 0 <= request_seed(*one) < 2**63
