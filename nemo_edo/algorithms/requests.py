"""The requests of a collection or an evaluation, each with its own seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import groupby

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


def group_parts(requests: Sequence[GenerationRequest], size: int) -> list[list[GenerationRequest]]:
    """The requests in parts of at most ``size``; those to one problem, which follow each other, stay in one part."""
    parts: list[list[GenerationRequest]] = [[]]
    for _, group in groupby(requests, key=lambda request: request.problem_id):
        together = list(group)
        if parts[-1] and len(parts[-1]) + len(together) > size:
            parts.append([])
        parts[-1] += together
    return [part for part in parts if part]
