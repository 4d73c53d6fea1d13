"""Evaluates a policy within a run: responses on disk part by part, metrics logged, results and the best policy kept."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nemo_edo.algorithms.requests import sampling_requests
from nemo_edo.data.batching import minibatches
from nemo_edo.errors import RunStopped
from nemo_edo.evaluation.evaluator import Evaluator, Keeping, Tuning
from nemo_edo.evaluation.results import START as WARMUP
from nemo_edo.evaluation.results import Evaluation, kind_at, kinds, load_evaluation, newly_solved_and_lost
from nemo_edo.generation.in_process import ServedModel
from nemo_edo.interfaces import GenerationEngine, Scorer
from nemo_edo.rollouts.resumable import Parts
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run.early_stop import trained_iterations
from nemo_edo.run.services import RunServices
from nemo_edo.run.settings import RunSettings
from nemo_edo.run.stop_signal import StopSignal
from nemo_edo.run.summary import SOLUTION_COLUMNS, solution_rows
from nemo_edo.run.tracking import log_table
from nemo_edo.types import GenerationRequest, Problem, SamplingParams, ScoredRollout

if TYPE_CHECKING:
    from nemo_edo.worker.remote import RemotePolicy


def evaluate_policy(
    run: RunServices,
    settings: RunSettings,
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
    methods. anew: the stored responses of an earlier one are kept until the new ones are complete, and then replaced.
    """
    folder = run.folder
    if model.engine is None:
        run.builder.connect(model)
    model.weight_sync.push(iteration)
    begun = time.monotonic()
    stores = {}
    for kind in kinds(settings.evaluation, final=final):
        path = folder.evaluated(arm, kind)
        if anew:
            # Responses at the first temperature have it in the name, so that a killed evaluation does not resume with
            # those of another temperature.
            first = settings.evaluation.temperature[0]
            is_first = kind == kind_at(first, settings.evaluation)
            path = folder.evaluated_anew(arm, f"{kind}_t{first:g}" if is_first else kind)
        stores[kind] = run.store(path)
    evaluation, responses = _measure(run, settings, model, arm, iteration, stores, final=final)
    seconds = time.monotonic() - begun
    if final:
        model.weight_sync.release()
    if anew:
        for kind, store in stores.items():
            run.store(folder.evaluated(arm, kind)).take_over(iteration, store)
    if final:  # where the training ended early, fewer than its responses' number says
        iteration = trained_iterations(settings, folder, arm)
    metric = settings.checkpoint.best
    if metric is not None and arm in settings.arms:
        from nemo_edo.run.best_policies import keep_best

        keep_best(model, folder, settings.checkpoint, arm, evaluation.mean(metric), iteration)
    _log(run, settings, evaluation, iteration, final, seconds)
    folder.write_evaluation(evaluation, None if final else iteration)
    for note in run.builder.analyse_test_time(arm) if final else ():
        print(note)
    rows = solution_rows(run.data.test, responses, arm, iteration)
    log_table(run.tracker, f"{arm}/evaluation/solutions", SOLUTION_COLUMNS, rows, step=iteration)
    return responses


def _measure(
    run: RunServices,
    settings: RunSettings,
    model: RemotePolicy | ServedModel,
    arm: str,
    iteration: int,
    stores: Mapping[str, RolloutStore],
    *,
    final: bool,
) -> tuple[Evaluation, list[ScoredRollout]]:
    """The metrics of each test problem, and the first rollout's responses."""
    data, config = run.data, settings.evaluation
    if not final:
        config = replace(config, temperature=config.temperature[:1], tuning_problems=0)
    rollouts = config.rollouts if final else 1
    evaluator = Evaluator(
        policy=None if isinstance(model, ServedModel) else model,
        engine=model.engine,
        scorer=data.scorer,
        problems=data.test,
        prompts=data.prompts,
        config=config,
        max_new_tokens=settings.sampling.max_new_tokens,
        pad_id=data.pad_id,
        keeping=KeepsParts(stores, iteration, settings.generation.part_size, run.stop, arm),
    )
    # The same random numbers for every arm and iteration: differences between them come from the policies.
    requests = sampling_requests(data.test, data.prompts, rollouts * config.samples, settings.seed, "evaluate")
    tuning = None
    if config.tuning_problems:
        problems = data.train[: config.tuning_problems]
        asked = sampling_requests(problems, data.prompts, config.samples, settings.seed, "tune")
        tuning = Tuning(problems, asked)
    return evaluator.evaluate(arm, requests, rollouts, tuning)


class KeepsParts(Keeping):
    """Keeps an evaluation's responses on disk, part by part, and takes those of a killed process from there."""

    def __init__(
        self, stores: Mapping[str, RolloutStore], iteration: int, part_size: int, stop: StopSignal, arm: str
    ) -> None:
        """stores: by kind of responses."""
        self._stores, self._iteration, self._part_size = stores, iteration, part_size
        self._stop, self._arm = stop, arm

    def responses(
        self,
        kind: str,
        requests: Sequence[GenerationRequest],
        engine: GenerationEngine,
        scorer: Scorer,
        sampling: SamplingParams,
        problems: Sequence[Problem],
    ) -> list[ScoredRollout]:
        store = self._stores[kind]
        parts = Parts(store, self._iteration)
        scorer.begin(parts.earlier)
        responses: list[ScoredRollout] = []
        for asked in minibatches(requests, self._part_size):
            part = parts.on_disk(asked)
            if not part:
                if self._stop.is_asked():
                    raise RunStopped(f"stopped, with the finished parts of {self._arm}'s evaluation saved")
                part = parts.generate(asked, engine, scorer, sampling, problems)
            responses += part
        store.write(self._iteration, responses, rank=0, world_size=1)
        return responses


def _log(
    run: RunServices, settings: RunSettings, evaluation: Evaluation, iteration: int, final: bool, seconds: float
) -> None:
    """What a judge was asked since the last evaluation, the means with their intervals, and the test problems that an
    arm has newly solved and lost, since its start and since its last evaluation. The earlier evaluations are read from
    disk: a resumed run has them, too."""
    arm, judge = evaluation.arm, run.data.judge
    if judge is not None:
        report = judge.take_report()
        print(report.in_words(judge.settings))
        run.log("judge", arm=arm, iteration=iteration, **report.numbers(judge.settings))
    changes: dict[str, float] = {}
    if arm != WARMUP:
        earlier = {"": run.folder.evaluation(WARMUP), "_since_last": run.folder.evaluation_before(arm, iteration)}
        for suffix, path in earlier.items():
            for name, number in newly_solved_and_lost(load_evaluation(path), evaluation).items():
                changes[name + suffix] = number
    metrics = evaluation.means(resamples=settings.evaluation.bootstrap, seed=settings.seed)
    clocks = {"evaluation_s": seconds}
    run.log("evaluation", arm=arm, iteration=iteration, final=final, metrics=metrics, **changes, time=clocks)
