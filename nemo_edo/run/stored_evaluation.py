"""What more compute would make of a run's stored responses: ``nemo-edo evaluate --stored``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_edo.config import NONE
from nemo_edo.evaluation.evaluator import read_samples
from nemo_edo.evaluation.results import KINDS, START, Evaluation, load_evaluation
from nemo_edo.evaluation.stored import aggregated, analyse, differences, differences_table, table, weighs
from nemo_edo.rollouts.store import RolloutStore, ScoreStore
from nemo_edo.run.build import RunSettings
from nemo_edo.run.stored_run import open_run
from nemo_edo.run_folder import SUMMARY, RunFolder, taken

AS_IT_IS = "model as it is"


def evaluate_stored(runs: Sequence[Path], arm: str | None, overrides: list[str]) -> list[str]:
    """Computes RUN/test_time/ARM.json of every arm (or the one) of the runs that has been evaluated, from the responses
    and scores that are stored; returns what there is to print.

    ``overrides``: of evaluation.* only. Raises UserError where something is missing, damaged or does not fit.
    """
    with taken(runs):
        opened = [open_run(run, overrides, only=["evaluation."], command="evaluate --stored") for run in runs]
        chosen = [(run.folder, run.cfg, name) for run in opened for name in run.evaluated([arm] if arm else [])]
        evaluations: dict[str, Evaluation] = {}
        said: list[str] = []
        for folder, cfg, name in chosen:
            alone = [run.name for run in runs].count(folder.path.name) == 1
            shown = AS_IT_IS if cfg.algorithm == NONE else name
            label = shown if len(runs) == 1 else f"{folder.path.name if alone else folder.path}/{shown}"
            stores = {kind: RolloutStore(folder.evaluated(name, kind)) for kind in KINDS}
            temperature = load_evaluation(folder.evaluation(name)).temperature
            evaluations[label], notes = analyse_arm(folder, RunSettings.of(cfg), name, stores, temperature)
            folder.write_results(folder.test_time(name), evaluations[label])
            said += notes
        settings = {"resamples": opened[0].cfg.evaluation.bootstrap, "seed": opened[0].cfg.seed}
        said.append(table(evaluations, **settings))
        if len(evaluations) > 1:
            # The arm that the first run's report compares with, if it is there with another trained one.
            first, names = opened[0].folder, [name for *_, name in chosen]
            named = first.summary(("baseline",))["baseline"] if (first.path / SUMMARY).is_file() else None
            several = len(names) - names.count(START) > 1
            baseline = list(evaluations)[names.index(named) if named in names and several else 0]
            said.append(differences_table(differences(evaluations, baseline, **settings), baseline))
        return [*said, *(f"written: {folder.test_time(name)}" for folder, _, name in chosen)]


def analyse_arm(
    folder: RunFolder, settings: RunSettings, arm: str, stores: Mapping[str, RolloutStore], temperature: float
) -> tuple[Evaluation, list[str]]:
    """What more compute makes of an arm's responses of a final evaluation, by ``KINDS``, sampled at a temperature; and
    which scores were left out and why."""
    config, iteration = settings.evaluation, settings.final_iteration(arm)
    greedy, sampled = (read_samples(stores[kind], iteration) for kind in KINDS)
    scores, said = {}, []
    for path in sorted(folder.scores(arm, "x").parent.glob("*/sampled.parquet")):
        name, (steps, scored) = path.parent.name, ScoreStore(path.parent).read("sampled")
        if scored != sampled.checksum:
            said.append(f"{path}: left out: it scores other responses than the stored ones; score them again")
            continue
        scores[name] = aggregated(name, sampled.steps(steps), config.aggregation)
        if not weighs(scores[name]):
            said.append(f"weighted@k/{name} of {arm}: left out: votes' weights must be at least 0, and these are not")
    fixed = {"each": config.samples, "subsets": config.vote_subsets, "seed": settings.seed}
    return analyse(arm, greedy, sampled, scores, temperature=temperature, **fixed), said
