"""Requests and the seeds that fix their random numbers."""


from nemo_edo.algorithms.plan import request_seed, sampling_requests
from nemo_edo.types import Problem

PROBLEMS = [Problem(name, "q", "#### 1", "1", "file:1") for name in ("train-2", "train-1")]
PROMPTS = {"train-1": (1,), "train-2": (2, 3)}


def test_a_samples_seed_does_not_depend_on_how_many_are_sampled_or_on_other_problems():
    few, many = (sampling_requests(problems, PROMPTS, samples, 42, "evaluate")
                 for problems, samples in ((PROBLEMS[:1], 2), (PROBLEMS, 10)))
    assert few == many[:2]


def test_the_seed_of_known_parts_never_changes():
    """Another value would make runs of an earlier version impossible to repeat."""
    assert request_seed(42, "collect", 0, "train-1", 0) == 7213978838430774035
