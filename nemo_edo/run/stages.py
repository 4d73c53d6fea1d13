"""A run's stages: the warm-up and each arm's training, with their evaluations. Each is done once, and resumes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_edo.algorithms.iteration import run_iterations
from nemo_edo.algorithms.plan import Plan
from nemo_edo.algorithms.samples import generate_and_score
from nemo_edo.algorithms.supervised import train_supervised
from nemo_edo.errors import RunStopped, StoppedByGuard
from nemo_edo.evaluation.results import START as WARMUP
from nemo_edo.generation.in_process import ServedModel
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run.early_stop import early_stop
from nemo_edo.run.kept_files import check_arm, check_stage, check_trained, evaluated
from nemo_edo.run.policy_evaluation import evaluate_policy
from nemo_edo.run.services import RunServices, StageLog, profiled, training_services
from nemo_edo.run.settings import RunSettings
from nemo_edo.run.summary import examples
from nemo_edo.worker.worker import Worker

if TYPE_CHECKING:
    from nemo_edo.run.resume import SavedProgress
    from nemo_edo.worker.remote import RemotePolicy

UNTRAINED = -1
"""The version of the weights before the warm-up."""


def do_stage(run: RunServices, settings: RunSettings, name: str) -> None:
    """Does a stage unless the journal has it: then its checkpoint, its evaluation and its samples are on disk."""
    if name in run.folder.journal():
        check_stage(settings, run.folder, name)
    else:
        if run.stop.is_asked():
            raise RunStopped(f"stopped before {name} began, with all before it saved")
        run.data.made_from.require_unchanged()  # the stage may read some of it again
        begun = run.log.elapsed
        run.console.begin(name)
        try:
            if name != WARMUP:
                scored = train_arm(run, settings, name)
            else:
                scored = warm_up(run, settings) if settings.trains else evaluate_untrained(run, settings)
        except StoppedByGuard as stopped:
            raise StoppedByGuard(f"{name}, {stopped}") from stopped
        run.log("phases", arm=name, time=run.clock.take())
        run.folder.write_json(f"samples/{name}.json", examples(run.data.test, scored))
        run.folder.note(name, **run.log.mark, seconds=round(run.log.elapsed - begun, 1))
    with run.clock.phase("checkpoint"):
        run.folder.remove_progress(name)


# --- the warm-up --------------------------------------------------------------------------------------------------


def warm_up(run: RunServices, settings: RunSettings) -> list:
    """Trains and evaluates the policy that every arm starts from."""
    with run.clock.phase("start"):
        model = run.builder.first()
        _log_kernels(run, model)
        run.builder.connect(model)
    if not _load_trained(run, model, WARMUP):
        if settings.sft.steps:
            _train_warm_up(run, settings, model)
        else:
            _cut_metrics(run, None)
        _save_trained(run, model, WARMUP)
    with run.clock.phase("evaluate"):
        return evaluate_policy(run, settings, model, WARMUP, 0)


def _train_warm_up(run: RunServices, settings: RunSettings, model: RemotePolicy) -> None:
    with run.clock.phase("refit"):
        model.weight_sync.push(UNTRAINED)  # an engine that weights cannot reach is found before the training
        model.weight_sync.release()
    with run.clock.phase("start"):
        model.start_training(settings.sft.steps)
    progress = _resumed(run, settings, model, WARMUP)
    train_supervised(
        model,
        run.data.solutions,
        settings.sft,
        pad_id=run.data.pad_id,
        seed=settings.seed,
        log=StageLog(run, WARMUP),
        progress=progress,
        guards=settings.guards,
        clock=run.clock,
    )
    with run.clock.phase("checkpoint"):
        progress.settle()


def evaluate_untrained(run: RunServices, settings: RunSettings) -> list:
    """The only stage of a run that trains nothing."""
    _cut_metrics(run, None)
    with run.clock.phase("start"):
        model = untrained_model(run)
    with run.clock.phase("evaluate"):
        return evaluate_policy(run, settings, model, WARMUP, 0)


def untrained_model(run: RunServices) -> RemotePolicy | ServedModel:
    """The model of a run that trains nothing."""
    model = run.builder.untrained()
    if not isinstance(model, ServedModel):
        _log_kernels(run, model)
    return model


def _log_kernels(run: RunServices, model: RemotePolicy) -> None:
    used = model.places[0].kernels
    print("computed with: " + ", ".join(f"{part} {what}" for part, what in used.items()))
    run.folder.write_json("kernels.json", used)


# --- an arm -------------------------------------------------------------------------------------------------------


def train_arm(run: RunServices, settings: RunSettings, arm: str) -> list:
    """Trains an arm by Algorithm 1 from the warm-up's policy, and evaluates it."""
    model = _arm_model(run, settings, arm)
    if _load_trained(run, model, arm):
        check_trained(settings, run.folder, arm)
    else:
        plan = _plan(run, settings, model, arm)
        progress = _begin_arm(run, settings, model, arm, plan)
        evaluations = ShortEvaluations(run, settings, model, arm)
        services = training_services(run, model, arm, plan, progress)
        with profiled(run, settings, arm, services) as services:
            try:
                run_iterations(services, plan, evaluations.evaluate)
            except (RunStopped, StoppedByGuard):  # in an evaluation, for example: the training before it is not lost
                progress.settle()
                raise
        with run.clock.phase("checkpoint"):
            progress.settle()
        _save_trained(run, model, arm)
    with run.clock.phase("evaluate"):
        return evaluate_policy(run, settings, model, arm, settings.arms[arm].iterations)


class ShortEvaluations:
    """The evaluations within an arm's training."""

    def __init__(self, run: RunServices, settings: RunSettings, model: RemotePolicy, arm: str) -> None:
        self._run, self._settings, self._model, self._arm = run, settings, model, arm

    def evaluate(self, t: int) -> bool:
        """Evaluates the policy where iteration t is due. Returns whether the training ends here."""
        run, settings, arm = self._run, self._settings, self._arm
        iterations = settings.arms[arm].iterations
        if t not in evaluated(settings, arm, iterations):
            return False
        with run.clock.phase("evaluate"):
            evaluate_policy(run, settings, self._model, arm, t, final=False)
        stop = early_stop(settings.early_stop, run.folder, arm, last=t)
        if stop is not None:
            run.console.say(f"{arm} {stop.in_words(iterations)}")
        return stop is not None


def collect_arm(run: RunServices, settings: RunSettings, arm: str) -> None:
    """Generates the samples that the arm needs next, unless it has begun to train on them."""
    model = _arm_model(run, settings, arm)
    plan = _plan(run, settings, model, arm)
    progress = _begin_arm(run, settings, model, arm, plan)
    start = progress.start
    if start.iteration < plan.config.iterations and not start.step:
        services = training_services(run, model, arm, plan, progress)
        services.weight_sync.push(start.iteration)
        generate_and_score(services, plan, start)
    print(f"rollouts of arm {arm}: {run.folder.rollouts(arm)}")


def _arm_model(run: RunServices, settings: RunSettings, arm: str) -> RemotePolicy:
    """The policy that every arm starts from."""
    with run.clock.phase("start"):
        model = run.builder.model(settings.arms[arm], run.folder.checkpoint(WARMUP))
        model.freeze_reference()
        run.builder.connect(model)
    return model


def _plan(run: RunServices, settings: RunSettings, model: RemotePolicy, arm: str) -> Plan:
    generation = settings.generation
    return Plan(
        config=settings.arms[arm],
        problems=run.data.train,
        prompts=run.data.prompts,
        sampling=settings.sampling,
        seed=settings.seeds[arm],
        guards=run.builder.guards(model.places[0].layers),
        part_size=generation.part_size,
        lag=int(generation.one_step_off),
        keeps_stale=generation.stale == "correct",
    )


def _begin_arm(run: RunServices, settings: RunSettings, model: RemotePolicy, arm: str, plan: Plan) -> SavedProgress:
    """The model with its optimizer, at the arm's last checkpoint."""
    with run.clock.phase("start"):
        model.start_training(plan.total_steps)
    rollouts = RolloutStore(run.folder.rollouts(arm))
    keeps_reference = plan.config.reference == "ema"
    progress = _resumed(run, settings, model, arm, keeps_reference=keeps_reference, rollouts=rollouts)
    check_arm(settings, run.folder, arm, progress.start.iteration, is_within=progress.start.step > 0)
    return progress


# --- where a stage resumes ----------------------------------------------------------------------------------------


def _resumed(run: RunServices, settings: RunSettings, model: RemotePolicy, stage: str, **more: Any) -> SavedProgress:
    """Loads the stage's last checkpoint into the model, and cuts the metrics to that place."""
    from nemo_edo.run.resume import SavedProgress

    progress = SavedProgress(model, run.folder, stage, settings.checkpoint, stop=run.stop, log=run.log, **more)
    with run.clock.phase("checkpoint"):
        progress.resume()
        _cut_metrics(run, progress.metrics_mark)
    return progress


def _save_trained(run: RunServices, model: RemotePolicy, stage: str) -> None:
    from nemo_edo.run.resume import require_finite

    with run.clock.phase("checkpoint"):
        require_finite(model, "at the end of the training")
        model.workers.call(Worker.save, run.folder.checkpoint(stage), run.log.mark)


def _load_trained(run: RunServices, model: RemotePolicy, stage: str) -> bool:
    """Whether the stage's training was finished already, but not its evaluation: then the model gets its weights."""
    from nemo_edo.megatron import checkpoint
    from nemo_edo.megatron.checksums import DamagedCheckpoint

    folder = run.folder.checkpoint(stage)
    if not folder.is_dir():
        return False
    try:
        with run.clock.phase("checkpoint"):
            model.workers.call(Worker.load, folder)
    except DamagedCheckpoint as error:
        warnings.warn(f"{error}; training resumes from before it", stacklevel=2)
        return False
    _cut_metrics(run, checkpoint.load_extra(folder))
    return True


def _cut_metrics(run: RunServices, mark: Mapping[str, Any] | None) -> None:
    """Removes what was logged after the place that the run resumes from; None: the end of the last stage."""
    last = [*run.folder.journal().values()][-1] if mark is None else mark
    run.log.cut(last)
    run.clock.carry_on(last.get("phases", {}))
