"""Steps from a real vLLM server beside those of the in-process engine, on the quickstart's model with random weights.

    python step_server_worker.py FOLDER

FOLDER/results.json will hold what tests/servers/test_steps.py looks at.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from nemo_edo import factory
from nemo_edo.algorithms.sampling import sampling_requests
from nemo_edo.configuration import compose_run
from nemo_edo.data.batching import build_batch
from nemo_edo.generation.step_proposer import EngineStepProposer
from nemo_edo.megatron.build import device_and_groups
from nemo_edo.run_folder import RunFolder
from nemo_edo.test_time.search_llm import StepPath
from nemo_edo.types import Rollout, SamplingParams

SEPARATORS = ("1", "\n", "21")
"""In many tokens, a token of its own, and a token or the end of one and the beginning of the next."""
QUESTIONS, LIMIT = 40, 24


def solved(engine, data, sampling: SamplingParams, separator: str, count: int) -> list[Rollout]:
    """Solutions drawn step by step, ``count`` from the first step on, to their ends."""
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
    """Responses of a server with a stop string beside those that the same seeds draw without."""
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
    drawn = solved(servers, data, SamplingParams(1.0, 1.0, LIMIT), separator, 3)
    batch = build_batch([(r.prompt_ids, r.response_ids) for r in drawn], pad_id=data.pad_id,
                        sampler_logprobs=[r.response_logprobs for r in drawn])
    log_probs, _ = model.log_probs(batch)
    return {
        "greedy_same": sum(a.response_ids == b.response_ids for a, b in zip(here, there, strict=True)),
        "drawn": len(drawn),
        "with_every_logprob": sum(len(r.response_logprobs) == len(r.response_ids) for r in drawn),
        "largest_gap": float((log_probs - batch.sampler_logprobs).abs()[batch.mask != 0].max()),
        **plain_beginnings(servers, data, (separator,)),
    }


def main(folder: Path) -> None:
    cfg = compose_run("quickstart", ["generation=vllm", "threads=1"])
    run = RunFolder(folder / "run")
    device_and_groups(cfg.parallelism, cfg.seed, cfg.threads)
    factory.write_builtin_files(cfg, run)
    data = factory.load_data(cfg, run)
    model = factory.build_model(cfg, run, cfg.grpo)
    factory.check_servers(cfg)
    servers = factory.start_servers(cfg, run, data)
    try:
        in_process = factory.build_engine(cfg, model, data, None)
        results = {separator: compare(model, in_process, servers, data, separator) for separator in SEPARATORS}
    finally:
        servers.close()
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
