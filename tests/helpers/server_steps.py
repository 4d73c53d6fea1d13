"""Steps from a real vLLM server compared with those from the in-process engine (tests/helpers/server_worker.py)."""

from dataclasses import replace

from nemo_edo.algorithms.requests import sampling_requests
from nemo_edo.data.batching import build_batch
from nemo_edo.search.step_proposer import EngineStepProposer
from nemo_edo.test_time.search_llm import StepPath
from nemo_edo.types import Rollout, SamplingParams

SEPARATORS = ("1", "\n", "21")
"""Many tokens, one separate token, and a token or the end of one and the beginning of the next."""
QUESTIONS, LIMIT = 40, 24


def solved(engine, data, sampling: SamplingParams, separator: str, count: int) -> list[Rollout]:
    """Solutions sampled step by step, ``count`` from the first step on, to their ends."""
    problems = data.train[:QUESTIONS]
    proposer = EngineStepProposer(
        engine, {p.question: (p.id, data.prompts[p.id]) for p in problems}, sampling, separator=separator,
        decode=data.decode, answers=None,
    )  # fmt: skip
    going, ended = [StepPath(problem.question) for problem in problems], {}
    depth = 0
    while going:
        found = proposer.propose(going, count if depth == 0 else 1, [1000 * depth + i for i in range(len(going))])
        steps = [(replace(path, steps=(*path.steps, step.text)), step.finished)
                 for path, of_path in zip(going, found, strict=True) for step in of_path]
        ended |= {path: None for path, finished in steps if finished}
        going = list({path: None for path, finished in steps if not finished})
        depth += 1
    return [proposer.solution(path, True, 0) for path in ended]


def plain_beginnings(engine, data, stop: tuple[str, ...]) -> dict:
    """Responses of a server with a stop string, compared with those of the same seeds without one."""
    asked = sampling_requests(data.train[:QUESTIONS], data.prompts, 4, 1, "stop")
    sampled = SamplingParams(1.0, 1.0, LIMIT)
    whole, cut = engine.generate(asked, sampled), engine.generate(asked, replace(sampled, stop=stop))
    met = [rollout for rollout in cut if rollout.stop]
    return {
        "asked": len(asked),
        "met": len(met),
        "beginnings": sum(
            a.response_ids == b.response_ids[: len(a.response_ids)] for a, b in zip(cut, whole, strict=True)
        ),
        "contained": sum(r.stop in r.text and r.stop not in data.decode(r.response_ids[:-1]) for r in met),
        "largest_gap": max(
            abs(x - y)
            for a, b in zip(cut, whole, strict=True)
            for x, y in zip(a.response_logprobs, b.response_logprobs, strict=False)
        ),
    }


def compare(model, in_process, servers, data, separator: str) -> dict:
    greedy = SamplingParams(0.0, 1.0, LIMIT)
    here, there = (solved(engine, data, greedy, separator, 1) for engine in (in_process, servers))
    sampled = solved(servers, data, SamplingParams(1.0, 1.0, LIMIT), separator, 3)
    batch = build_batch([(r.prompt_ids, r.response_ids) for r in sampled], pad_id=data.pad_id,
                        sampler_logprobs=[r.response_logprobs for r in sampled])
    logprobs, _ = model.logprobs(batch)
    return {
        "greedy_same": sum(a.response_ids == b.response_ids for a, b in zip(here, there, strict=True)),
        "sampled": len(sampled),
        "with_every_logprob": sum(len(r.response_logprobs) == len(r.response_ids) for r in sampled),
        "largest_gap": float((logprobs - batch.sampler_logprobs).abs()[batch.mask != 0].max()),
        **plain_beginnings(servers, data, (separator,)),
    }
