"""A run's stages: the warm-up and each arm's training, with their evaluations. Each is done once, and resumes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_edo.algorithms.iteration import generate_and_score, run_iterations
from nemo_edo.algorithms.plan import Plan
from nemo_edo.algorithms.supervised import train_supervised
from nemo_edo.config import LoopConfig, RunConfig
from nemo_edo.config.arms import arm_seed
from nemo_edo.errors import RunStopped, StoppedByGuard
from nemo_edo.evaluation.results import START as WARMUP
from nemo_edo.generation.in_process import ServedModel
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run import build, inputs
from nemo_edo.run.console import RunConsole
from nemo_edo.run.early_stop import early_stop
from nemo_edo.run.folder import RunFolder
from nemo_edo.run.kept_files import check_arm, check_stage, check_trained, evaluated
from nemo_edo.run.metrics_log import MetricsLog
from nemo_edo.run.policy_evaluation import evaluate_policy
from nemo_edo.run.services import CHECKPOINTS, profiled, services, stage_log
from nemo_edo.run.stop_signal import StopSignal
from nemo_edo.run.summary import examples
from nemo_edo.utils.phases import PhaseClock, timed
from nemo_edo.worker.worker import Worker

if TYPE_CHECKING:
    from nemo_edo.generation.server_engine import ServerEngine
    from nemo_edo.run.resume import SavedProgress
    from nemo_edo.worker.remote import RemotePolicy

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
    stop: StopSignal
    console: RunConsole
    servers: ServerEngine | None
    """The engine of all stages; None: each generates with its own model."""
    clock: PhaseClock


def stage(job: Job, name: str, work: Callable[[], list]) -> None:
    """Does a stage unless the journal has it: then its checkpoint, its evaluation and its samples are on disk."""
    if name in job.folder.journal():
        check_stage(job, name)
    else:
        if job.stop.is_asked():
            raise RunStopped(f"stopped before {name} began, with all before it saved")
        begun = job.log.elapsed
        job.console.begin(name)
        try:
            scored = work()
        except StoppedByGuard as stopped:
            raise StoppedByGuard(f"{name}, {stopped}") from stopped
        job.log("phases", arm=name, time=job.clock.take())
        _note_end(job, name, scored, begun)
    with job.clock.phase("checkpoint"):
        job.folder.remove_progress(name)


def _note_end(job: Job, name: str, scored: list, begun: float) -> None:
    job.folder.write_json(f"samples/{name}.json", examples(job.data.test, scored))
    job.folder.note(name, **job.log.mark, seconds=round(job.log.elapsed - begun, 1))


# --- the warm-up --------------------------------------------------------------------------------------------------


def warm_up(job: Job) -> list:
    """Trains and evaluates the policy that every arm starts from."""
    with job.clock.phase("start"):
        model = build.build_model(job.cfg, job.folder, job.cfg.sft)
        _log_kernels(job, model)
        build.connect(job.cfg, job.folder, model, job.data, job.servers)
    if not _load_trained(job, model, WARMUP):
        if job.cfg.sft.steps:
            _train_warm_up(job, model)
        else:
            _cut_metrics(job, None)
        _save_trained(job, model, WARMUP)
    with job.clock.phase("evaluate"):
        return evaluate_policy(job, model, WARMUP, 0)


def _train_warm_up(job: Job, model: RemotePolicy) -> None:
    cfg = job.cfg
    with job.clock.phase("refit"):
        model.weight_sync.push(UNTRAINED)  # an engine that weights cannot reach is found before the training
        model.weight_sync.release()
    with job.clock.phase("start"):
        model.start_training(cfg.sft.steps)
    progress = _resumed(job, model, WARMUP)
    train_supervised(
        timed(model, job.clock, train_step="train"),
        job.data.solutions,
        cfg.sft,
        pad_id=job.data.pad_id,
        seed=cfg.seed,
        log=stage_log(job, WARMUP),
        progress=timed(progress, job.clock, **CHECKPOINTS),
        guards=cfg.guards,
    )
    with job.clock.phase("checkpoint"):
        progress.settle()


def evaluate_untrained(job: Job) -> list:
    """The only stage of a run that trains nothing."""
    _cut_metrics(job, None)
    with job.clock.phase("start"):
        model = untrained_model(job)
    with job.clock.phase("evaluate"):
        return evaluate_policy(job, model, WARMUP, 0)


def untrained_model(job: Job) -> RemotePolicy | ServedModel:
    """The model of a run that trains nothing, behind the run's servers or in this process."""
    if job.servers is not None:
        return ServedModel(job.servers)
    model = build.build_model(job.cfg, job.folder, job.cfg.sft)
    _log_kernels(job, model)
    return model


def _log_kernels(job: Job, model: RemotePolicy) -> None:
    used = model.places[0].kernels
    print("computed with: " + ", ".join(f"{part} {what}" for part, what in used.items()))
    job.folder.write_json("kernels.json", used)


# --- an arm -------------------------------------------------------------------------------------------------------


def train_arm(job: Job, arm: str) -> list:
    """Trains an arm by Algorithm 1 from the warm-up's policy, and evaluates it."""
    settings = job.arms[arm]
    with job.clock.phase("start"):
        model = _arm_model(job, settings)

    def short_evaluation(t: int) -> bool:
        """Whether the training ends here."""
        if t not in evaluated(job, arm, settings.iterations):
            return False
        with job.clock.phase("evaluate"):
            evaluate_policy(job, model, arm, t, final=False)
        stop = early_stop(job.cfg, job.folder, arm, last=t)
        if stop is not None:
            job.console.say(f"{arm} {stop.in_words(settings.iterations)}")
        return stop is not None

    if _load_trained(job, model, arm):
        check_trained(job, arm)
    else:
        plan = _plan(job, model, arm)
        progress = _begin_arm(job, model, arm, plan)
        with profiled(job, arm, services(job, model, arm, plan, progress)) as called:
            try:
                run_iterations(called, plan, short_evaluation)
            except (RunStopped, StoppedByGuard):  # in an evaluation, for example: the training before it is not lost
                progress.settle()
                raise
        with job.clock.phase("checkpoint"):
            progress.settle()
        _save_trained(job, model, arm)
    with job.clock.phase("evaluate"):
        return evaluate_policy(job, model, arm, settings.iterations)


def collect_arm(job: Job, arm: str) -> None:
    """Generates the samples that the arm needs next, unless it has begun to train on them."""
    model = _arm_model(job, job.arms[arm])
    plan = _plan(job, model, arm)
    progress = _begin_arm(job, model, arm, plan)
    start = progress.start
    if start.iteration < plan.config.iterations and not start.step:
        called = services(job, model, arm, plan, progress)
        called.weight_sync.push(start.iteration)
        generate_and_score(called, plan, start)
    print(f"rollouts of arm {arm}: {job.folder.rollouts(arm)}")


def _arm_model(job: Job, settings: LoopConfig) -> RemotePolicy:
    """The policy that every arm starts from."""
    start = job.folder.checkpoint(WARMUP)
    model = build.build_model(job.cfg, job.folder, settings, weights=start)
    model.freeze_reference()
    build.connect(job.cfg, job.folder, model, job.data, job.servers)
    return model


def _plan(job: Job, model: RemotePolicy, arm: str) -> Plan:
    cfg, generation = job.cfg, job.cfg.generation
    return Plan(
        config=job.arms[arm],
        problems=job.data.train,
        prompts=job.data.prompts,
        sampling=cfg.sampling,
        seed=arm_seed(cfg, arm),
        guards=build.build_guards(cfg, model.places[0].layers),
        part_size=generation.part_size,
        lag=int(generation.one_step_off),
        keeps_stale=generation.stale == "correct",
    )


def _begin_arm(job: Job, model: RemotePolicy, arm: str, plan: Plan) -> SavedProgress:
    """The model with its optimizer, at the arm's last checkpoint."""
    with job.clock.phase("start"):
        model.start_training(plan.total_steps)
    store = RolloutStore(job.folder.rollouts(arm))
    keeps_reference = plan.config.reference == "ema"
    progress = _resumed(job, model, arm, keeps_reference=keeps_reference, stored=store.read)
    check_arm(job, arm, progress.start.iteration, is_within=progress.start.step > 0)
    return progress


# --- where a stage resumes ----------------------------------------------------------------------------------------


def _resumed(job: Job, model: RemotePolicy, stage: str, **settings: Any) -> SavedProgress:
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
    with job.clock.phase("checkpoint"):
        progress.resume()
        _cut_metrics(job, progress.metrics_mark)
    return progress


def _save_trained(job: Job, model: RemotePolicy, stage: str) -> None:
    from nemo_edo.run.resume import require_finite

    with job.clock.phase("checkpoint"):
        require_finite(model, "at the end of the training")
        model.workers.call(Worker.save, job.folder.checkpoint(stage), job.log.mark)


def _load_trained(job: Job, model: RemotePolicy, stage: str) -> bool:
    """Whether the stage's training was finished already, but not its evaluation: then the model gets its weights."""
    from nemo_edo.megatron import checkpoint
    from nemo_edo.megatron.checksums import DamagedCheckpoint

    folder = job.folder.checkpoint(stage)
    if not folder.is_dir():
        return False
    try:
        with job.clock.phase("checkpoint"):
            model.workers.call(Worker.load, folder)
    except DamagedCheckpoint as error:
        warnings.warn(f"{error}; training resumes from before it", stacklevel=2)
        return False
    _cut_metrics(job, checkpoint.load_extra(folder))
    return True


def _cut_metrics(job: Job, mark: Mapping[str, Any] | None) -> None:
    """Removes what was logged after the place that the run resumes from; None: the end of the last stage."""
    last = [*job.folder.journal().values()][-1] if mark is None else mark
    job.log.cut(last)
    job.clock.carry_on(last.get("phases", {}))
