"""Evaluation from stored responses: of one run's arms, or of several runs'. It needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nemo_edo.config import RunConfig
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import KINDS, START, Evaluation, load_evaluation
from nemo_edo.evaluation.stored import aggregated, analyse, weighs
from nemo_edo.evaluation.stored_table import differences, differences_table, table
from nemo_edo.rollouts.arrays import Samples, read_samples
from nemo_edo.rollouts.score_store import ScoreStore
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run.folder import RunFolder
from nemo_edo.run.stored_run import final_iteration, open_run
from nemo_edo.utils.files import read_object


def evaluate_stored(runs: Sequence[Path], arm: str | None, overrides: list[str]) -> list[str]:
    """Computes RUN/test_time/ARM.json of every arm (or the one) of the runs that has been evaluated, from the responses
    and scores that are stored; returns what there is to print.

    ``overrides``: of evaluation.* only. Raises UserError where something is missing, damaged or does not fit.
    """
    strange = [override for override in overrides if not override.lstrip("+").startswith("evaluation.")]
    if strange:
        raise UserError(f"evaluate --stored takes overrides of evaluation.* only, not {', '.join(strange)}")
    opened = [open_run(run, overrides) for run in runs]
    chosen = [(run.folder, run.cfg, name) for run in opened for name in run.evaluated([arm] if arm else [])]
    evaluations: dict[str, Evaluation] = {}
    said: list[str] = []
    for folder, cfg, name in chosen:
        label = name if len(runs) == 1 else f"{_short_name(folder.path, runs)}/{name}"
        evaluations[label], notes = analyse_arm(folder, cfg, name)
        said += notes
    settings = {"resamples": opened[0].cfg.evaluation.bootstrap, "seed": opened[0].cfg.seed}
    said.append(table(evaluations, **settings))
    if len(evaluations) > 1:
        baseline = _baseline(opened[0].folder, list(evaluations), [name for *_, name in chosen])
        said.append(differences_table(differences(evaluations, baseline, **settings), baseline))
    return [*said, *(f"written: {folder.test_time(name)}" for folder, _, name in chosen)]


def analyse_arm(folder: RunFolder, cfg: RunConfig, arm: str) -> tuple[Evaluation, list[str]]:
    """Writes RUN/test_time/ARM.json of an arm whose final evaluation is stored; returns it, and what was left out."""
    iteration = final_iteration(cfg, arm)
    greedy, sampled = (read_samples(RolloutStore(folder.evaluated(arm, k)), iteration) for k in KINDS)
    scores, said = _scores(folder, arm, sampled, cfg.evaluation.aggregation)
    evaluation = analyse(
        arm,
        greedy,
        sampled,
        scores,
        each=cfg.evaluation.samples,
        subsets=cfg.evaluation.vote_subsets,
        seed=cfg.seed,
        temperature=load_evaluation(folder.evaluation(arm)).temperature,
    )
    folder.write_test_time(evaluation)
    return evaluation, said


def _scores(folder: RunFolder, arm: str, sampled: Samples, how: str) -> tuple[dict, list[str]]:
    """The scores of the stored responses, and in words which scores were left out and why."""
    scores, said = {}, []
    for path in sorted(folder.scores(arm, "x").parent.glob("*/sampled.parquet")):
        store, name = ScoreStore(path.parent), path.parent.name
        if store.rollouts("sampled") != sampled.checksum:
            said.append(f"{path}: left out: it scores other responses than the stored ones; score them again")
            continue
        scores[name] = aggregated(name, sampled.steps(store.read("sampled")), how)
        if not weighs(scores[name]):
            said.append(f"weighted@k/{name} of {arm}: left out: votes' weights must be at least 0, and these are not")
    return scores, said


def _baseline(folder: RunFolder, labels: list[str], arms: list[str]) -> str:
    """The arm that the first run's report compares with, if it is there with another trained one; otherwise the
    first."""
    summary = folder.path / "summary.json"
    named = read_object(summary, ("baseline",))["baseline"] if summary.is_file() else None
    trained = [name for name in arms if name != START]
    return labels[arms.index(named)] if named in arms and len(trained) > 1 else labels[0]


def _short_name(path: Path, runs: Sequence[Path]) -> str:
    return path.name if [run.name for run in runs].count(path.name) == 1 else str(path)
