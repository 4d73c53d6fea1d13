"""Evaluates a policy within a run: responses on disk part by part, metrics logged, results and the best policy kept."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_edo.algorithms.requests import sampling_requests
from nemo_edo.errors import RunStopped
from nemo_edo.evaluation.evaluator import Evaluator, Tuning
from nemo_edo.evaluation.results import START as WARMUP
from nemo_edo.evaluation.results import Evaluation, kind_at, kinds, load_evaluation, newly_solved_and_lost
from nemo_edo.generation.in_process import ServedModel
from nemo_edo.rollouts.resumable import Answer, InParts
from nemo_edo.rollouts.store import RolloutStore, tokenizer_identity
from nemo_edo.run import build
from nemo_edo.run.early_stop import trained_iterations
from nemo_edo.run.evaluate_stored import analyse_arm
from nemo_edo.run.summary import SOLUTION_COLUMNS, solution_rows
from nemo_edo.run.tracking import log_table
from nemo_edo.types import GenerationRequest, ScoredRollout

if TYPE_CHECKING:
    from nemo_edo.run.stages import Job
    from nemo_edo.worker.remote import RemotePolicy


def evaluate_policy(
    job: Job,
    model: RemotePolicy | ServedModel,
    arm: str,
    iteration: int,
    *,
    final: bool = True,
    anew: bool = False,
) -> list[ScoredRollout]:
    """Evaluates the arm's policy on the test problems; returns the responses that the report may show.

    An evaluation within the training (``final`` False) samples one rollout per problem at the first of
    ``evaluation.temperature``. The final one samples ``evaluation.rollouts`` at each and also measures test-time
    methods. anew: the stored responses of an earlier one are kept
    until the new ones are complete, and then replaced.
    """
    if model.engine is None:
        build.connect(job.cfg, job.folder, model, job.data, job.servers)
    model.weight_sync.push(iteration)
    begun = time.monotonic()
    stores = {
        kind: _store(job, _anew(job, arm, kind) if anew else job.folder.evaluated(arm, kind))
        for kind in kinds(job.cfg.evaluation, final=final)
    }
    evaluation, responses = _measure(job, model, arm, iteration, stores, final=final)
    seconds = time.monotonic() - begun
    if final:
        model.weight_sync.release()
    if anew:
        for kind, store in stores.items():
            _store(job, job.folder.evaluated(arm, kind)).take_over(iteration, store)
    if final:  # where the training ended early, fewer than its responses' number says
        iteration = trained_iterations(job.cfg, job.folder, arm)
    metric = job.cfg.checkpoint.best
    if metric is not None and arm in job.arms:
        from nemo_edo.run.best_policies import keep_best

        keep_best(model, job.folder, job.cfg.checkpoint, arm, evaluation.mean(metric), iteration)
    _log_judge(job, arm, iteration)
    _log_metrics(job, evaluation, iteration, final, seconds)
    _write_results(job, evaluation, responses, iteration, final)
    return responses


def _write_results(
    job: Job, evaluation: Evaluation, responses: Sequence[ScoredRollout], iteration: int, final: bool
) -> None:
    job.folder.write_evaluation(evaluation, None if final else iteration)
    if final:
        _analyse_test_time(job, evaluation.arm)
    _show_solutions(job, responses, evaluation.arm, iteration)


def _measure(
    job: Job,
    model: RemotePolicy | ServedModel,
    arm: str,
    iteration: int,
    stores: Mapping[str, RolloutStore],
    *,
    final: bool,
) -> tuple[Evaluation, list[ScoredRollout]]:
    """The metrics of each test problem, and the first rollout's responses."""
    cfg, data, settings = job.cfg, job.data, job.cfg.evaluation
    if not final:
        settings = replace(settings, temperature=settings.temperature[:1], tuning_problems=0)
    rollouts = settings.rollouts if final else 1
    evaluator = Evaluator(
        policy=None if isinstance(model, ServedModel) else model,
        engine=model.engine,
        scorer=data.scorer,
        problems=data.test,
        prompts=data.prompts,
        config=settings,
        max_new_tokens=cfg.sampling.max_new_tokens,
        pad_id=data.pad_id,
        keeping=partial(_keeping, job, arm, iteration, stores),
    )
    # The same random numbers for every arm and iteration: differences between them come from the policies.
    requests = sampling_requests(data.test, data.prompts, rollouts * settings.samples, cfg.seed, "evaluate")
    tuning = None
    if settings.tuning_problems:
        problems = data.train[: settings.tuning_problems]
        asked = sampling_requests(problems, data.prompts, settings.samples, cfg.seed, "tune")
        tuning = Tuning(problems, asked)
    return evaluator.evaluate(arm, requests, rollouts, tuning)


def _store(job: Job, folder: Path) -> RolloutStore:
    return RolloutStore(folder, tokenizer=tokenizer_identity(job.data.tokenizer))


def _anew(job: Job, arm: str, kind: str) -> Path:
    """Where an evaluation that replaces another one keeps its responses. Those at the first temperature have it in the
    name, so that a killed evaluation does not resume with the responses of another temperature."""
    sampled = kind_at(first := job.cfg.evaluation.temperature[0], job.cfg.evaluation)
    return job.folder.evaluated_anew(arm, f"{kind}_t{first:g}" if kind == sampled else kind)


def _keeping(
    job: Job, arm: str, iteration: int, stores: Mapping[str, RolloutStore], kind: str, answer: Answer
) -> Answer:
    """Keeps an evaluation's responses on disk, part by part, and takes those of a killed process from there."""
    store = stores[kind]

    def stop_if_asked() -> None:
        if job.stop.is_asked():
            raise RunStopped(f"stopped, with the finished parts of {arm}'s evaluation saved")

    def answer_and_keep(requests: Sequence[GenerationRequest]) -> list[ScoredRollout]:
        size = job.cfg.generation.part_size
        in_parts = InParts(store, iteration, answer, part_size=size, before_part=stop_if_asked)
        job.data.scorer.begin(in_parts.earlier)
        scored = in_parts(requests)
        store.write(iteration, scored, rank=0, world_size=1)
        return scored

    return answer_and_keep


def _log_judge(job: Job, arm: str, iteration: int) -> None:
    """What a judge was asked since the last evaluation, and whether rules agree with it."""
    judge = job.data.judge
    if judge is None:
        return
    report = judge.take_report()
    print(report.in_words(judge.settings))
    job.log("judge", arm=arm, iteration=iteration, **report.numbers(judge.settings))


def _log_metrics(job: Job, evaluation: Evaluation, iteration: int, final: bool, seconds: float) -> None:
    """The means with their intervals, and the problems that were newly solved and lost."""
    arm, clocks = evaluation.arm, {"evaluation_s": seconds}
    metrics = evaluation.means(resamples=job.cfg.evaluation.bootstrap, seed=job.cfg.seed)
    changes = _changes(job, evaluation, iteration)
    job.log("evaluation", arm=arm, iteration=iteration, final=final, metrics=metrics, **changes, time=clocks)


def _changes(job: Job, evaluation: Evaluation, iteration: int) -> dict[str, float]:
    """Test problems that an arm has newly solved and lost, since its start and since its last evaluation. The earlier
    evaluations are read from disk: a resumed run has them, too."""
    arm = evaluation.arm
    if arm == WARMUP:
        return {}
    earlier = {"": job.folder.evaluation(WARMUP), "_since_last": job.folder.evaluation_before(arm, iteration)}
    return {
        name + suffix: number
        for suffix, path in earlier.items()
        for name, number in newly_solved_and_lost(load_evaluation(path), evaluation).items()
    }


def _analyse_test_time(job: Job, arm: str) -> None:
    """What voting, best-of-N and weights make of the stored responses."""
    _, notes = analyse_arm(job.folder, job.cfg, arm)
    for note in notes:
        print(note)


def _show_solutions(job: Job, responses: Sequence[ScoredRollout], arm: str, iteration: int) -> None:
    """A table of some solutions, for the trackers."""
    rows = solution_rows(job.data.test, responses, arm, iteration)
    log_table(job.trainer, f"{arm}/evaluation/solutions", SOLUTION_COLUMNS, rows, step=iteration)
