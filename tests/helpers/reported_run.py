"""Adds to a made-up run's folder what only some runs have: stored responses, curves over them, and a search."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from nemo_edo.report.run_set import read_run
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import Rollout, ScoredRollout

ATTACK = "<script>document.title = 'attacked'; window.attacked = true</script>"
LARGEST = 16


def enrich(folder: Path) -> None:
    """For every evaluated policy of the run; seven nodes of a search of depth two."""
    record = read_run(folder)
    rng = np.random.default_rng(0)
    for place, (arm, evaluation) in enumerate(record.evaluations.items()):
        problems = evaluation.problems
        iteration = record.arms[arm].iterations if arm in record.arms else 0
        scored = [_response(problem, sample, rng) for problem in problems[:3] for sample in range(8)]
        if arm == "edo_paper":  # one response is truncated, another has words that no other has
            scored[3] = _with(scored[3], finished=False)
            scored[20] = _with(scored[20], text=f"{scored[20].rollout.text} found only here")
        RolloutStore(folder / "evaluations" / arm / "sampled").write(iteration, scored)
        alone = {"edo_paper": (0, 1), "edo_floor": (1,)}.get(arm, ())  # the first problem is solved by one arm only
        greedy = [replace(_response(problem, 0, rng), reward=float(number in alone))
                  for number, problem in enumerate(problems[:3])]
        RolloutStore(folder / "evaluations" / arm / "greedy").write(iteration, greedy)
        curves = {}
        for k in range(1, LARGEST + 1):
            level = 0.4 + 0.03 * place + 0.1 * np.log(k)
            for name in ("majority@{}", "pass@{}", "best_of@{}/mine", "best_of@{}/oracle"):
                curves[name.format(k)] = np.clip(rng.normal(level, 0.2, len(problems)), 0, 1).tolist()
            curves[f"tokens@{k}"] = [24.0 * k] * len(problems)
        metrics = {name: {"sum": values, "count": [1] * len(problems)} for name, values in curves.items()}
        _write(folder / "test_time" / f"{arm}.json", {"arm": arm, "problems": list(problems), "metrics": metrics})
    parents = [None, 0, 0, 0, 1, 1, 2]
    nodes = [{"parent": parent, "step": "" if parent is None else f"step {place} {ATTACK}", "finished": place > 3,
              "samples": 1, "reward": 0.1 * place, "width": 1.0, "value": 1.0 + 0.1 * place,
              "made_at": 0 if parent is None else 1 + (place > 3), "expanded_at": 1 if place in parents else None}
             for place, parent in enumerate(parents)]
    _write(folder / "search" / "test-0.json", {"question": f"2 + 2 {ATTACK}", "best": 6, "nodes": nodes})


def _response(problem: str, sample: int, rng: np.random.Generator) -> ScoredRollout:
    answer = str(10 + int(rng.integers(0, 3)))
    text = f"6 + 3 = 9 ; 9 + 2 = {answer} {'x' * 120 if sample == 0 else ''} ; {ATTACK} #### {answer}"
    rollout = Rollout(problem, sample, (1,), (2,), (-1.0,), text, True, 0, sample)
    return ScoredRollout(rollout, float(answer == "11"), answer, True, "")


def _with(scored: ScoredRollout, **changes: object) -> ScoredRollout:
    return replace(scored, rollout=replace(scored.rollout, **changes))


def _write(path: Path, record: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record))
