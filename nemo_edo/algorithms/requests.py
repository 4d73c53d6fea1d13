"""The requests of a collection or an evaluation, each with its own seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from nemo_edo.types import GenerationRequest, Problem


def request_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part (run seed, purpose, iteration, problem, sample) and nothing else."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_requests(
    problems: Sequence[Problem], prompts: Mapping[str, tuple[int, ...]], samples: int, *seed_parts: object
) -> list[GenerationRequest]:
    """``samples`` requests for each problem, problem by problem."""
    return [
        GenerationRequest(problem.id, index, prompts[problem.id], request_seed(*seed_parts, problem.id, index))
        for problem in problems
        for index in range(samples)
    ]
