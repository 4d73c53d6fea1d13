"""Evaluates a policy within a run: responses on disk part by part, metrics logged, results and the best policy kept."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nemo_edo.algorithms.requests import sampling_requests
from nemo_edo.errors import RunStopped
from nemo_edo.evaluation.evaluator import Evaluator, Keeping, Tuning
from nemo_edo.evaluation.results import START as WARMUP
from nemo_edo.evaluation.results import Evaluation, kind_at, kinds, load_evaluation, newly_solved_and_lost
from nemo_edo.generation.in_process import ServedModel
from nemo_edo.interfaces import GenerationEngine, Scorer
from nemo_edo.rollouts.resumable import Parts, Watch
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run.early_stop import trained_iterations
from nemo_edo.run.folder import METRICS, REPLACEMENT, RunFolder
from nemo_edo.run.services import RunServices
from nemo_edo.run.settings import RunSettings
from nemo_edo.run.stop_signal import StopSignal
from nemo_edo.run.summary import SOLUTION_COLUMNS, solution_rows
from nemo_edo.run.tracking import log_table
from nemo_edo.types import GenerationRequest, Problem, SamplingParams, ScoredRollout

if TYPE_CHECKING:
    from nemo_edo.worker.remote import RemotePolicy


@dataclass
class Replacement:
    """What new evaluations of a finished run put in the place of the stored ones, once all of them are complete
    (``RunFolder.replace_evaluations``)."""

    responses: list[tuple[str, str, int]] = field(default_factory=list)
    """(the store's folder, that of the new responses, iteration), below the run's folder."""
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    test_time: dict[str, Evaluation] = field(default_factory=dict)

    def put(self, folder: RunFolder, lines: str) -> None:
        """lines: of metrics.jsonl."""
        results = {folder.evaluation(arm): evaluation for arm, evaluation in self.evaluations.items()}
        results |= {folder.test_time(arm): evaluation for arm, evaluation in self.test_time.items()}
        record = {
            "responses": self.responses,
            "results": {str(path.relative_to(folder.path)): one.record() for path, one in results.items()},
            "metrics_bytes": (folder.path / METRICS).stat().st_size,
            "lines": lines,
        }
        folder.write_json(REPLACEMENT, record)
        folder.replace_evaluations()


def evaluate_policy(
    run: RunServices,
    settings: RunSettings,
    model: RemotePolicy | ServedModel,
    arm: str,
    iteration: int,
    *,
    final: bool = True,
    anew: Replacement | None = None,
) -> list[ScoredRollout]:
    """Evaluates the arm's policy on the test problems; returns the responses that the report may show.

    An evaluation within the training (``final`` False) samples one rollout per problem at the first of
    ``evaluation.temperature``. The final one samples ``evaluation.rollouts`` at each and also measures test-time
    methods. anew: the stored evaluation stays, and this gets what replaces it.
    """
    folder = run.folder
    if model.engine is None:
        run.builder.connect(model)
    model.weight_sync.push(iteration)
    begun = time.monotonic()
    stores = {}
    for kind in kinds(settings.evaluation, final=final):
        path = folder.evaluated(arm, kind)
        if anew is not None:
            # Responses at the first temperature have it in the name, so that a killed evaluation does not resume with
            # those of another temperature.
            first = settings.evaluation.temperature[0]
            is_first = kind == kind_at(first, settings.evaluation)
            path = folder.evaluated_anew(arm, f"{kind}_t{first:g}" if is_first else kind)
        stores[kind] = run.store(path)
    evaluation, responses = _measure(run, settings, model, arm, iteration, stores, final=final)
    seconds, number = time.monotonic() - begun, iteration
    if final:
        model.weight_sync.release()
        # Where the training ended early, fewer than its responses' number says.
        iteration = trained_iterations(settings, folder, arm)
    metric = settings.checkpoint.best
    if metric is not None and arm in settings.arms and anew is None:
        from nemo_edo.run.best_policies import keep_best

        keep_best(model, folder, settings.checkpoint, arm, evaluation.mean(metric), iteration)
    earlier = {} if anew is None else anew.evaluations
    _log(run, settings, evaluation, iteration, final, seconds, earlier.get(WARMUP))
    if anew is None:
        folder.write_evaluation(evaluation, None if final else iteration)
    if final:
        test_time, notes = run.builder.analyse_test_time(arm, stores, evaluation.temperature)
        print(*notes, sep="\n", end="\n" if notes else "")
        if anew is None:
            folder.write_test_time(test_time)
        else:
            places = [(folder.evaluated(arm, kind), store.folder) for kind, store in stores.items()]
            names = ((str(path.relative_to(folder.path)) for path in pair) for pair in places)
            anew.responses += [(*pair, number) for pair in names]
            anew.evaluations[arm], anew.test_time[arm] = evaluation, test_time
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


class KeepsParts(Keeping, Watch):
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
        parts = Parts(store, self._iteration, part_size=self._part_size, watch=self)
        scorer.begin(parts.earlier)
        responses = parts.responses(requests, engine, scorer, sampling, problems)
        store.write(self._iteration, responses, rank=0, world_size=1)
        return responses

    def begin_part(self) -> None:
        self.alive()
        self.stop_if_asked()

    def alive(self) -> None:
        self._stop.alive()

    def stop_if_asked(self) -> None:
        if self._stop.was_asked:
            raise RunStopped(f"stopped, with the finished responses of {self._arm}'s evaluation saved")


def _log(
    run: RunServices, settings: RunSettings, evaluation: Evaluation, iteration: int, final: bool, seconds: float,
    start: Evaluation | None,
) -> None:  # fmt: skip
    """What a judge was asked since the last evaluation, the means with their intervals, and the test problems that an
    arm has newly solved and lost, since its start and since its last evaluation. The earlier evaluations are read from
    disk: a resumed run has them, too. start: of the arm's start, where it is not there yet."""
    arm, judge = evaluation.arm, run.data.judge
    if judge is not None:
        report = judge.take_report()
        print(report.in_words(judge.settings))
        run.log("judge", arm=arm, iteration=iteration, **report.numbers(judge.settings))
    changes: dict[str, float] = {}
    if arm != WARMUP:
        earlier = {"": run.folder.evaluation(WARMUP), "_since_last": run.folder.evaluation_before(arm, iteration)}
        for suffix, path in earlier.items():
            first = load_evaluation(path) if start is None or path != run.folder.evaluation(WARMUP) else start
            for name, number in newly_solved_and_lost(first, evaluation).items():
                changes[name + suffix] = number
    metrics = evaluation.means(resamples=settings.evaluation.bootstrap, seed=settings.seed)
    clocks = {"evaluation_s": seconds}
    run.log("evaluation", arm=arm, iteration=iteration, final=final, metrics=metrics, **changes, time=clocks)
