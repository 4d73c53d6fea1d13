"""A run's stages: the warm-up and each arm's training, with their evaluations. Each is done once, and resumes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

from nemo_edo.algorithms.ahead import Ahead, InBackground, NothingAhead, SavesBetween, generate_ahead
from nemo_edo.algorithms.iteration import Services, generate_and_score, run_iterations
from nemo_edo.algorithms.plan import Plan
from nemo_edo.algorithms.supervised import train_supervised
from nemo_edo.config import NONE, LoopConfig, RunConfig
from nemo_edo.config.arms import arm_seed
from nemo_edo.errors import RunStopped, StoppedByGuard, UserError
from nemo_edo.evaluation.results import KINDS, load_evaluation
from nemo_edo.evaluation.results import START as WARMUP
from nemo_edo.parallel.main_rank import on_main
from nemo_edo.rollouts.store import RolloutStore, tokenizer_identity
from nemo_edo.run import build, inputs
from nemo_edo.run.console import RunConsole
from nemo_edo.run.folder import RESTORE, RunFolder
from nemo_edo.run.metrics_log import MetricsLog
from nemo_edo.run.on_rank_0 import AheadOnMain, SharedRolloutStore
from nemo_edo.run.policy_evaluation import evaluate_policy
from nemo_edo.run.stop_signal import StopSignal
from nemo_edo.run.summary import examples
from nemo_edo.utils.garbage import free_unused_memory

if TYPE_CHECKING:
    from nemo_edo.generation.server_engine import ServedModel, ServerEngine
    from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
    from nemo_edo.run.resume import SavedProgress

UNTRAINED = -1
"""The version of the weights before the warm-up."""


@dataclass(frozen=True)
class Job:
    """What every stage of a run needs."""

    cfg: RunConfig
    arms: dict[str, LoopConfig]
    folder: RunFolder
    data: inputs.Data
    trainer: object
    log: MetricsLog
    is_main: bool
    stop: StopSignal
    console: RunConsole
    servers: ServerEngine | None
    """The engine of all stages; None: each generates with its own model."""


def stage(job: Job, name: str, work: Callable[[], list]) -> None:
    """Does a stage unless the journal has it: then its checkpoint, its evaluation and its samples are on disk."""
    if name in on_main(job.folder.journal):
        _check_weights(job, name)
        on_main(lambda: _check_results(job, name))
    else:
        if job.stop.agreed():
            raise RunStopped(f"stopped before {name} began, with all before it saved")
        begun = job.log.elapsed
        job.console.begin(name)
        try:
            scored = work()
        except StoppedByGuard as stopped:
            raise StoppedByGuard(f"{name}, {stopped}") from stopped
        on_main(lambda: _note_end(job, name, scored, begun))
        free_unused_memory()  # of the stage's model, before the next one is built
    on_main(lambda: job.folder.remove_progress(name))


def _note_end(job: Job, name: str, scored: list, begun: float) -> None:
    job.folder.write_json(f"samples/{name}.json", examples(job.data.test, scored))
    job.folder.note(name, **job.log.mark, seconds=round(job.log.elapsed - begun, 1))


def _check_weights(job: Job, name: str) -> None:
    """Raises UserError, on every rank, where a finished stage's policies are missing or damaged."""
    from nemo_edo.megatron.checksums import DamagedCheckpoint, check_checksums

    folders = [job.folder.checkpoint(name)] if job.cfg.algorithm != NONE else []
    best = job.folder.best_checkpoint(name)
    for folder in [*folders, best] if on_main(best.exists) else folders:
        try:
            check_checksums(folder)
        except DamagedCheckpoint as error:
            raise UserError(f"{error}; {RESTORE}") from error


def _check_results(job: Job, name: str) -> None:
    """Raises UserError where results of a finished stage are missing or damaged that the report needs, before any other
    stage spends time."""
    iterations = job.arms[name].iterations if name in job.arms else 0
    short = [job.folder.evaluation(name, t) for t in _evaluated(job, name, iterations)]
    for path in (job.folder.evaluation(name), job.folder.test_time(name), *short):
        load_evaluation(path)
    _warn_of_lost_responses(job, name, iterations, [*_evaluated(job, name, iterations), iterations])


def _warn_of_lost_responses(job: Job, name: str, iterations: int, evaluated: Sequence[int]) -> None:
    """Nothing in the run reads the stored responses of earlier iterations again. evaluated: the iterations whose
    evaluations are done."""
    folder = job.folder
    lost = RolloutStore(folder.rollouts(name)).lost(range(iterations) if name in job.arms else ())
    for kind in KINDS:
        lost += RolloutStore(folder.evaluated(name, kind)).lost(evaluated)
    for path in lost:
        warnings.warn(
            f"{path} is missing or damaged; training and results no longer need it; restore it from a copy if you "
            "do",
            stacklevel=2,
        )


def _evaluated(job: Job, name: str, before: int) -> list[int]:
    """The iterations below ``before`` with a short evaluation."""
    every = job.cfg.evaluation.every
    return [t for t in range(before) if t % every == 0] if every and name in job.arms else []


# --- the warm-up --------------------------------------------------------------------------------------------------


def warm_up(job: Job) -> list:
    """Trains and evaluates the policy that every arm starts from."""
    model = build.build_model(job.cfg, job.folder, job.cfg.sft, job.trainer)
    _log_kernels(job, model)
    build.connect(job.cfg, job.folder, model, job.data, job.servers)
    if not _load_trained(job, model, WARMUP):
        if job.cfg.sft.steps:
            _train_warm_up(job, model)
        else:
            _cut_metrics(job, None)
        _save_trained(job, model, WARMUP)
    return evaluate_policy(job, model, WARMUP, 0)


def _train_warm_up(job: Job, model: MegatronGPTModel) -> None:
    cfg = job.cfg
    model.weight_sync.push(UNTRAINED)  # an engine that weights cannot reach is found before the training
    model.weight_sync.release()
    model.start_training(cfg.sft.steps)
    progress = _resumed(job, model, WARMUP)
    train_supervised(
        model,
        job.data.solutions,
        cfg.sft,
        pad_id=job.data.pad_id,
        seed=cfg.seed,
        log=partial(job.log, arm=WARMUP),
        progress=progress,
        guards=cfg.guards,
    )
    progress.settle()


def evaluate_untrained(job: Job) -> list:
    """The only stage of a run that trains nothing."""
    _cut_metrics(job, None)
    return evaluate_policy(job, untrained_model(job), WARMUP, 0)


def untrained_model(job: Job) -> MegatronGPTModel | ServedModel:
    """The model of a run that trains nothing, behind the run's servers or in this process."""
    if job.servers is not None:
        from nemo_edo.generation.server_engine import ServedModel

        return ServedModel(job.servers)
    model = build.build_model(job.cfg, job.folder, job.cfg.sft, job.trainer)
    _log_kernels(job, model)
    return model


def _log_kernels(job: Job, model: MegatronGPTModel) -> None:
    from nemo_edo.megatron.implementations import kernels

    def log() -> None:
        used = kernels(model.built.chunks)
        print("computed with: " + ", ".join(f"{part} {what}" for part, what in used.items()))
        job.folder.write_json("kernels.json", used)

    on_main(log)


# --- an arm -------------------------------------------------------------------------------------------------------


def train_arm(job: Job, arm: str) -> list:
    """Trains an arm by Algorithm 1 from the warm-up's policy, and evaluates it."""
    settings = job.arms[arm]
    model = _arm_model(job, settings)

    def short_evaluation(t: int) -> None:
        if t in _evaluated(job, arm, settings.iterations):
            evaluate_policy(job, model, arm, t, final=False)

    if not _load_trained(job, model, arm):
        plan = _plan(job, model, arm)
        progress = _begin_arm(job, model, arm, plan)
        with _profiled(job, arm, _services(job, model, arm, plan, progress)) as services:
            try:
                run_iterations(services, plan, short_evaluation)
            except (RunStopped, StoppedByGuard):  # in an evaluation, for example: the training before it is not lost
                progress.settle()
                raise
        progress.settle()
        _save_trained(job, model, arm)
    return evaluate_policy(job, model, arm, settings.iterations)


def collect_arm(job: Job, arm: str) -> None:
    """Generates the samples that the arm needs next, unless it has begun to train on them."""
    model = _arm_model(job, job.arms[arm])
    plan = _plan(job, model, arm)
    progress = _begin_arm(job, model, arm, plan)
    start = progress.start
    if start.iteration < plan.config.iterations and not start.step:
        services = _services(job, model, arm, plan, progress)
        services.weight_sync.push(start.iteration)
        generate_and_score(services, plan, start)
    if job.is_main:
        print(f"rollouts of arm {arm}: {job.folder.rollouts(arm)}")


def _arm_model(job: Job, settings: LoopConfig) -> MegatronGPTModel:
    """The policy that every arm starts from."""
    start = job.folder.checkpoint(WARMUP)
    model = build.build_model(job.cfg, job.folder, settings, job.trainer, weights=start)
    model.freeze_reference()
    build.connect(job.cfg, job.folder, model, job.data, job.servers)
    return model


def _plan(job: Job, model: MegatronGPTModel, arm: str) -> Plan:
    cfg, generation = job.cfg, job.cfg.generation
    return Plan(
        config=job.arms[arm],
        problems=job.data.train,
        prompts=job.data.prompts,
        sampling=cfg.sampling,
        seed=arm_seed(cfg, arm),
        guards=build.build_guards(cfg, model.built.num_layers),
        part_size=generation.part_size,
        lag=int(generation.one_step_off),
        keeps_stale=generation.stale == "correct",
    )


def _begin_arm(job: Job, model: MegatronGPTModel, arm: str, plan: Plan) -> SavedProgress:
    """The model with its optimizer, at the arm's last checkpoint."""
    model.start_training(plan.total_steps)
    store = SharedRolloutStore(job.folder.rollouts(arm))
    keeps_reference = plan.config.reference == "ema"
    progress = _resumed(job, model, arm, keeps_reference=keeps_reference, stored=store.require_stored)
    t, is_within = progress.start.iteration, progress.start.step > 0
    on_main(lambda: _warn_of_lost_responses(job, arm, t, _evaluated(job, arm, t + is_within)))
    return progress


def _services(job: Job, model: MegatronGPTModel, arm: str, plan: Plan, progress: SavedProgress) -> Services:
    """What Algorithm 1 calls."""
    data, tokenizer = job.data, tokenizer_identity(job.data.tokenizer)
    ahead = _generating_ahead(job, model, arm, plan) if job.cfg.generation.one_step_off else NothingAhead()
    return Services(
        policy=model,
        engine=model.engine,
        weight_sync=model.weight_sync,
        scorer=data.scorer,
        objective=build.build_objective(job.cfg, plan.config, data, plan.seed),
        store=SharedRolloutStore(job.folder.rollouts(arm), tokenizer=tokenizer),
        log=partial(job.log, arm=arm),
        progress=SavesBetween(progress, ahead),
        given=inputs.given_rollouts(job.cfg, arm, data),
        ahead=ahead,
    )


@contextmanager
def _profiled(job: Job, arm: str, services: Services) -> Iterator[Services]:
    """The first rank's steps of ``profile.steps`` are traced."""
    steps = job.cfg.profile.steps
    if steps is None or not job.is_main:
        yield services
        return
    from nemo_edo.run.profiler import StepProfiler

    path = job.folder.path / "profile" / f"{arm}.json.gz"
    profiler = StepProfiler(services.log, tuple(steps), path, arm, services.progress.start.steps_taken)
    try:
        yield replace(services, log=profiler)
    finally:
        profiler.close()


def _generating_ahead(job: Job, model: MegatronGPTModel, arm: str, plan: Plan) -> Ahead:
    """Generates on the first rank alone, in a thread."""
    from nemo_edo.generation.server_engine import LocalEngine

    store = RolloutStore(job.folder.rollouts(arm), tokenizer=tokenizer_identity(job.data.tokenizer))

    def generate(t: int, stop: Event) -> dict[str, float]:
        engine = LocalEngine(model.engine, stop)
        return generate_ahead(plan, t, stop, engine=engine, scorer=job.data.scorer, store=store)

    return AheadOnMain(InBackground(generate))


# --- where a stage resumes ----------------------------------------------------------------------------------------


def _resumed(job: Job, model: MegatronGPTModel, stage: str, **settings: Any) -> SavedProgress:
    """Loads the stage's last checkpoint into the model, and cuts the metrics to that place."""
    from nemo_edo.run.resume import SavedProgress

    progress = SavedProgress(
        model,
        job.folder.progress(stage),
        job.cfg.checkpoint,
        stop=job.stop,
        metrics_mark=lambda: job.log.mark,
        failure=lambda step: job.folder.failure(stage, step),
        **settings,
    )
    progress.resume()
    _cut_metrics(job, progress.metrics_mark)
    return progress


def _save_trained(job: Job, model: MegatronGPTModel, stage: str) -> None:
    from nemo_edo.megatron import checkpoint
    from nemo_edo.run.resume import require_finite

    require_finite(model, "at the end of the training")
    checkpoint.save(model.policy, job.folder.checkpoint(stage), extra=job.log.mark)


def _load_trained(job: Job, model: MegatronGPTModel, stage: str) -> bool:
    """Whether the stage's training was finished already, but not its evaluation: then the model gets its weights."""
    from nemo_edo.megatron import checkpoint
    from nemo_edo.megatron.checksums import DamagedCheckpoint

    folder = job.folder.checkpoint(stage)
    if not on_main(folder.is_dir):
        return False
    try:
        checkpoint.load(model.policy, folder)
    except DamagedCheckpoint as error:
        if job.is_main:
            warnings.warn(f"{error}; training resumes from before it", stacklevel=2)
        return False
    _cut_metrics(job, checkpoint.load_extra(folder))
    return True


def _cut_metrics(job: Job, mark: Mapping[str, Any] | None) -> None:
    """Removes what was logged after the place that the run resumes from; None: the end of the last stage."""
    journal = on_main(job.folder.journal)
    on_main(lambda: job.log.cut([*journal.values()][-1] if mark is None else mark))
