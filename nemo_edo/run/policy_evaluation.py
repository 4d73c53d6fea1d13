"""Evaluates a policy within a run: responses on disk part by part, metrics logged, results and the best policy kept;
what more compute would make of stored responses; and where an arm's evaluations end its training."""

import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nemo_edo.algorithms.plan import sampling_requests
from nemo_edo.config import NONE, CheckpointConfig, EarlyStopConfig, RunConfig
from nemo_edo.config.compose import final_iteration
from nemo_edo.errors import UserError
from nemo_edo.evaluation import stored
from nemo_edo.evaluation.evaluator import Evaluator, Tuning, read_samples
from nemo_edo.evaluation.results import BEST, KINDS, Evaluation, kinds, load_evaluation, newly_solved_and_lost
from nemo_edo.evaluation.results import START as WARMUP
from nemo_edo.generation.in_process import ServedModel
from nemo_edo.interfaces import GenerationEngine
from nemo_edo.rollouts.resumable import Parts
from nemo_edo.rollouts.store import RolloutStore, ScoreStore
from nemo_edo.run.services import RunServices
from nemo_edo.run.stored_run import StoredRun, open_run
from nemo_edo.run.tracking import log_solutions
from nemo_edo.run_folder import SUMMARY, RunFolder, taken
from nemo_edo.types import GenerationRequest, Problem, SamplingParams, ScoredRollout
from nemo_edo.utils.files import checksum, read_object
from nemo_edo.worker.remote import RemotePolicy
from nemo_edo.worker.worker import Worker

Stores = Mapping[str, RolloutStore]
"""Stores of responses, by their kind."""


def evaluate_policy(
    run: RunServices, model: RemotePolicy | ServedModel, arm: str, iteration: int, *, final: bool = True
) -> list[ScoredRollout]:
    """Evaluates the arm's policy on the test problems; returns the responses that the report may show.

    An evaluation within the training (``final`` False) samples one rollout per problem at the first of
    ``evaluation.temperature``. The final one samples ``evaluation.rollouts`` at each and also measures test-time
    methods.
    """
    folder, data, cfg, config = run.folder, run.data, run.cfg, run.cfg.evaluation
    if model.engine is None:
        run.builder.connect(model)
    model.weight_sync.push(iteration)
    begun = time.monotonic()
    stores = {kind: run.store(folder.evaluated(arm, kind)) for kind in kinds(config, final=final)}
    if not final:
        config = replace(config, temperature=config.temperature[:1], tuning_problems=0)
    rollouts = config.rollouts if final else 1
    evaluator = Evaluator(
        policy=None if isinstance(model, ServedModel) else model,
        respond=partial(_respond, run, model.engine, iteration, stores),
        problems=data.test,
        config=config,
        max_new_tokens=cfg.sampling.max_new_tokens,
        pad_id=data.pad_id,
    )
    # The same random numbers for every arm and iteration: differences between them come from the policies.
    requests = sampling_requests(data.test, data.prompts, rollouts * config.samples, cfg.seed, "evaluate")
    tuning = None
    if config.tuning_problems:
        problems = data.train[: config.tuning_problems]
        asked = sampling_requests(problems, data.prompts, config.samples, cfg.seed, "tune")
        tuning = Tuning(problems, asked)
    evaluation, responses = evaluator.evaluate(arm, requests, rollouts, tuning)
    seconds = time.monotonic() - begun
    if final:
        model.weight_sync.release()
        # Where the training ended early, fewer than its responses' number says.
        iteration = trained_iterations(cfg, folder, arm)
    metric = cfg.checkpoint.best
    if metric is not None and arm != WARMUP and not folder.is_finished:
        keep_best(model, folder, cfg.checkpoint, arm, evaluation.mean(metric), iteration)
    _log(run, evaluation, iteration, final, seconds)
    folder.write_evaluation(evaluation, None if final else iteration)
    if final:
        test_time, notes = analyse_arm(folder, cfg, arm, stores, evaluation.temperature)
        print(*notes, sep="\n", end="\n" if notes else "")
        folder.write_json(folder.test_time(arm), test_time.record())
    log_solutions(run.tracker, data.test, responses, arm, iteration)
    return responses


def _log(run: RunServices, evaluation: Evaluation, iteration: int, final: bool, seconds: float) -> None:
    """What a judge was asked since the last evaluation, the means with their intervals, and the test problems that an
    arm has newly solved and lost, since its start and since its last evaluation; nothing where that had other problems,
    as before ``evaluation.limit`` is changed. The earlier evaluations are read from disk: a resumed run has them, too.
    """
    arm, judge = evaluation.arm, run.data.judge
    if judge is not None:
        report = judge.take_report()
        print(report.in_words(judge.settings))
        run.log("judge", arm=arm, iteration=iteration, **report.numbers(judge.settings))
    changes: dict[str, float] = {}
    if arm != WARMUP:
        earlier = {"": run.folder.evaluation(WARMUP), "_since_last": run.folder.evaluation_before(arm, iteration)}
        for suffix, path in earlier.items():
            before = load_evaluation(path)
            if before.problems == evaluation.problems:
                changes |= {name + suffix: count for name, count in newly_solved_and_lost(before, evaluation).items()}
    metrics = evaluation.means(resamples=run.cfg.evaluation.bootstrap, seed=run.cfg.seed)
    clocks = {"evaluation_s": seconds}
    run.log("evaluation", arm=arm, iteration=iteration, final=final, metrics=metrics, **changes, time=clocks)


def _respond(
    run: RunServices,
    engine: GenerationEngine,
    iteration: int,
    stores: Stores,
    kind: str,
    requests: Sequence[GenerationRequest],
    sampling: SamplingParams,
    problems: Sequence[Problem],
) -> list[ScoredRollout]:
    """``evaluator.Respond``: responses go to disk part by part, and those of a killed process come from there."""
    store, scorer = stores[kind], run.data.scorer
    parts = Parts(store, iteration, part_size=run.cfg.generation.part_size, watch=run.stop)
    scorer.begin(parts.earlier, len(requests))
    responses = parts.responses(requests, engine, scorer, sampling, problems)
    store.write(iteration, responses)
    return responses


# --- what more compute would make of stored responses ----------------------------------------------------------------


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
            shown = "model as it is" if cfg.algorithm == NONE else name
            label = shown if len(runs) == 1 else f"{folder.path.name if alone else folder.path}/{shown}"
            stores = {kind: RolloutStore(folder.evaluated(name, kind)) for kind in KINDS}
            temperature = load_evaluation(folder.evaluation(name)).temperature
            evaluations[label], notes = analyse_arm(folder, cfg, name, stores, temperature)
            folder.write_json(folder.test_time(name), evaluations[label].record())
            said += notes
        settings = {"resamples": opened[0].cfg.evaluation.bootstrap, "seed": opened[0].cfg.seed}
        said.append(stored.table(evaluations, **settings))
        if len(evaluations) > 1:
            _require_same_content(opened)
            # The arm that the first run's report compares with, if it is there with another trained one.
            first, names = opened[0].folder, [name for *_, name in chosen]
            summary = first.path / SUMMARY
            named = read_object(summary, ("baseline",))["baseline"] if summary.is_file() else None
            several = len(names) - names.count(WARMUP) > 1
            baseline = list(evaluations)[names.index(named) if named in names and several else 0]
            tested = stored.differences(evaluations, baseline, **settings)
            said.append(stored.differences_table(tested, baseline))
        return [*said, *(f"written: {folder.test_time(name)}" for folder, _, name in chosen)]


def _require_same_content(runs: Sequence[StoredRun]) -> None:
    """Raises UserError where two runs' test problems are known to be others, whatever their ids are."""
    contents: dict[tuple[str, ...], Path] = {}
    for run in runs:
        own, noted = run.folder.data / "test.jsonl", run.folder.journal().get("files", {}).get("inputs", {})
        if own.is_file():
            content = (checksum(own),)
        elif "data.test" not in noted:
            continue
        else:
            content = tuple(note[0] for note in noted["data.test"].values())
        contents.setdefault(content, run.folder.path)
    if len(contents) > 1:
        one, another, *_ = contents.values()
        raise UserError(f"{one} and {another} were evaluated on different problems: their test data have other content")


def analyse_arm(
    folder: RunFolder, cfg: RunConfig, arm: str, stores: Stores, temperature: float
) -> tuple[Evaluation, list[str]]:
    """What more compute makes of an arm's responses of a final evaluation, by ``KINDS``, sampled at a temperature; and
    which scores were left out and why."""
    config, iteration = cfg.evaluation, final_iteration(cfg, arm)
    greedy, sampled = (read_samples(stores[kind], iteration) for kind in KINDS)
    scores, said = {}, []
    for path in sorted(folder.scores(arm, "x").parent.glob("*/sampled.parquet")):
        name, (steps, scored) = path.parent.name, ScoreStore(path.parent).read("sampled")
        if scored != sampled.checksum:
            said.append(f"{path}: left out: it scores other responses than the stored ones; score them again")
            continue
        scores[name] = stored.aggregated(name, sampled.steps(steps), config.aggregation)
        if (scores[name] < 0).any():
            said.append(f"weighted@k/{name} of {arm}: left out: votes' weights must be at least 0, and these are not")
    fixed = {"each": config.samples, "subsets": config.vote_subsets, "seed": cfg.seed}
    return stored.analyse(arm, greedy, sampled, scores, temperature=temperature, **fixed), said


# --- what follows from evaluations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EarlyStop:
    """iteration: before which the training ended. best, best_iteration: the metric's best value, and where it was."""

    iteration: int
    best: float
    best_iteration: int
    settings: EarlyStopConfig

    def in_words(self, iterations: int) -> str:
        """iterations: those that the arm would have had."""
        change = "risen" if self.settings.mode == "max" else "fallen"
        by = f" by more than {self.settings.min_delta:g}" if self.settings.min_delta else ""
        count = "1 evaluation" if self.settings.patience == 1 else f"{self.settings.patience} evaluations"
        return (
            f"stopped after {self.iteration} of {iterations} iterations: {self.settings.metric} has not {change}"
            f"{by} in {count}; its best was {self.best:.3g}, after {self.best_iteration}"
        )


def early_stop(config: EarlyStopConfig, folder: RunFolder, arm: str, last: int | None = None) -> EarlyStop | None:
    """Where the arm's stored evaluations end its training, for a resumed run and whoever opens the run later, too; None
    where they do not. last: the last iteration whose evaluation counts; None: all."""
    metric = config.metric
    if metric is None:
        return None
    places = [t for t in folder.evaluated_iterations(arm) if last is None or t <= last]
    return end_of(((t, load_evaluation(folder.evaluation(arm, t)).mean(metric)) for t in places), config)


def end_of(values: Iterable[tuple[int, float]], settings: EarlyStopConfig) -> EarlyStop | None:
    """values: (iteration, value) of each evaluation in order. A value that is not a number is no improvement."""
    sign = 1 if settings.mode == "max" else -1
    best, best_iteration, waited = math.nan, 0, 0
    for iteration, value in values:
        if not math.isnan(value) and (math.isnan(best) or sign * (value - best) > settings.min_delta):
            best, best_iteration, waited = value, iteration, 0
            continue
        waited += 1
        if waited == settings.patience:
            return EarlyStop(iteration, best, best_iteration, settings)
    return None


def trained_iterations(cfg: RunConfig, folder: RunFolder, policy: str) -> int:
    """How many iterations a policy was trained for: an arm, the start of all arms, or one that ``checkpoint.best`` has
    kept."""
    if BEST in policy:
        return read_object(folder.checkpoint(policy) / "about.json", ("extra",))["extra"]["iteration"]
    stop = early_stop(cfg.early_stop, folder, policy)
    return final_iteration(cfg, policy) if stop is None else stop.iteration


def keep_best(
    model: RemotePolicy, folder: RunFolder, config: CheckpointConfig, arm: str, value: float, iteration: int
) -> None:
    """Keeps the policy, evaluated with ``value`` at the iteration, if it is among the ``config.best_count`` best: the
    best one as ``checkpoints/ARM.best``, the others as ``checkpoints/ARM.best_iter_00003`` and so on. A killed run
    evaluates again where it was killed, and sets right what it left."""
    from nemo_edo.megatron import checkpoint

    if math.isnan(value):
        return
    sign, best = -1 if config.best_mode == "max" else 1, folder.best_checkpoint(arm)

    def ranks() -> dict[Path, tuple[float, int]]:
        """Lower is better, of equal ones the earlier; nothing that was kept by another metric."""
        abouts = {path: checkpoint.load_extra(path) for path in folder.best_checkpoints(arm)}
        same = {path: about for path, about in abouts.items() if about["metric"] == config.best}
        return {path: (sign * about["value"], about["iteration"]) for path, about in same.items()}

    kept, rank = ranks(), (sign * value, iteration)
    is_new = iteration not in (t for _, t in kept.values())
    if is_new and sum(other < rank for other in kept.values()) < config.best_count:
        about = {"metric": config.best, "value": value, "iteration": iteration}
        model.workers.call(Worker.save, folder.best_checkpoint(arm, iteration), about)
        kept = ranks()
    ranked = sorted(kept, key=kept.__getitem__)[: config.best_count]
    removed = best.with_name(f"{best.name}.part")  # half a folder under a checkpoint's name would end each resumed run
    shutil.rmtree(removed, ignore_errors=True)  # of a killed run
    for path in folder.best_checkpoints(arm):
        if path not in ranked:
            shutil.rmtree(path.rename(removed))
    if ranked and ranked[0] != best:
        if best.is_dir():
            best.rename(folder.best_checkpoint(arm, kept[best][1]))
        ranked[0].rename(best)
