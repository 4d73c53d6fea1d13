"""A run's stages: the warm-up and each arm's training, with their evaluations. Each is done once, and resumes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_edo.algorithms.iteration import run_iterations, train_supervised
from nemo_edo.algorithms.plan import Plan
from nemo_edo.algorithms.samples import generate_and_score
from nemo_edo.config import NONE, RunConfig
from nemo_edo.config.compose import arm_configs, final_iteration
from nemo_edo.config.run import arm_seed, training_seed
from nemo_edo.errors import RESTORE, DamagedCheckpoint, RunStopped, StoppedByGuard, UserError
from nemo_edo.evaluation.results import KINDS, kinds, load_evaluation
from nemo_edo.evaluation.results import START as WARMUP
from nemo_edo.generation.in_process import ServedModel
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run.policy_evaluation import early_stop, evaluate_policy, trained_iterations
from nemo_edo.run.services import RunServices, profiled, training_services
from nemo_edo.run.summary import examples
from nemo_edo.run_folder import RunFolder
from nemo_edo.worker.dispatch import workers
from nemo_edo.worker.remote import RemotePolicy
from nemo_edo.worker.worker import Worker

if TYPE_CHECKING:
    from nemo_edo.run.resume import SavedProgress

UNTRAINED = -1
"""The version of the weights before the warm-up."""


def do_stage(run: RunServices, name: str) -> None:
    """Does a stage unless the journal has it: then its checkpoint, its evaluation and its samples are on disk."""
    if name in run.folder.journal():
        check_trained(run.cfg, run.folder, name, final=True)
    else:
        if run.stop.is_asked():
            raise RunStopped(f"stopped before {name} began, with all before it saved")
        run.data.made_from.require_unchanged()  # the stage may read some of it again
        # Of a stage that resumes, too: what this process's clock says counts from the cut of the metrics on.
        begun = [*run.folder.journal().values()][-1].get("elapsed_s", 0.0)
        run.console.begin(name)
        try:
            scored = warm_up(run) if name == WARMUP else train_arm(run, name)
        except StoppedByGuard as stopped:
            raise StoppedByGuard(f"{name}, {stopped}") from stopped
        run.log("phases", arm=name, time=run.clock.take())
        run.folder.write_json(f"samples/{name}.json", examples(run.data.test, scored))
        elapsed = round(run.log.elapsed, 1)
        run.folder.note(name, **run.log.mark, elapsed_s=elapsed, seconds=round(elapsed - begun, 1))
    with run.clock.phase("checkpoint"):
        run.folder.remove_progress(name)


# --- the warm-up --------------------------------------------------------------------------------------------------


def warm_up(run: RunServices) -> list:
    """Trains and evaluates the policy that every arm starts from; of a run that trains nothing, its only stage."""
    sft, trains = run.cfg.sft, run.cfg.algorithm != NONE
    if not trains:
        _cut_metrics(run, None)
    with run.clock.phase("start"):
        model = first_model(run)
        if trains:
            run.builder.connect(model)
    if trains and not _load_trained(run, model, WARMUP):
        if sft.steps:
            with run.clock.phase("refit"):
                model.weight_sync.push(UNTRAINED)  # an engine that weights cannot reach is found before the training
                model.weight_sync.release()
            with run.clock.phase("start"):
                model.start_training(sft.steps)
            progress = _resumed(run, model, WARMUP)
            _cut_metrics(run, progress.metrics_mark)
            train_supervised(
                model,
                run.data.solutions,
                sft,
                pad_id=run.data.pad_id,
                seed=run.cfg.seed,
                log=run.log_of(WARMUP),
                progress=progress,
                guards=run.cfg.guards,
                clock=run.clock,
            )
            with run.clock.phase("checkpoint"):
                progress.settle()
        else:
            _cut_metrics(run, None)
        _save_trained(run, model, WARMUP)
    with run.clock.phase("evaluate"):
        return evaluate_policy(run, model, WARMUP, 0)


def first_model(run: RunServices) -> RemotePolicy | ServedModel:
    """The model that the run starts from; of a run that trains nothing, it may be behind servers."""
    if run.cfg.algorithm == NONE and run.builder.servers is not None:
        return ServedModel(run.builder.servers)
    model = run.builder.first()
    used = model.places[0].kernels
    print("computed with: " + ", ".join(f"{part} {what}" for part, what in used.items()))
    run.folder.write_json("kernels.json", used)
    return model


# --- an arm -------------------------------------------------------------------------------------------------------


def train_arm(run: RunServices, arm: str) -> list:
    """Trains an arm by Algorithm 1 from the warm-up's policy, and evaluates it."""
    model, iterations = _arm_model(run, arm), run.arms[arm].iterations

    def evaluate(t: int) -> bool:
        """Evaluates the policy where iteration t is due. Returns whether the training ends here."""
        if t not in evaluated(run.cfg, arm, iterations):
            return False
        with run.clock.phase("evaluate"):
            evaluate_policy(run, model, arm, t, final=False)
        stop = early_stop(run.cfg.early_stop, run.folder, arm, last=t)
        if stop is not None:
            print(f"{arm} {stop.in_words(iterations)}", flush=True)
        return stop is not None

    if _load_trained(run, model, arm):
        check_trained(run.cfg, run.folder, arm)
    else:
        plan, progress = _begin_arm(run, model, arm)
        _cut_metrics(run, progress.metrics_mark)
        with profiled(run, arm, training_services(run, model, arm, plan, progress)) as services:
            try:
                run_iterations(services, plan, evaluate)
            except (
                RunStopped,
                StoppedByGuard,
                UserError,
            ):  # in an evaluation, for example: the training before is kept
                progress.settle()
                raise
        with run.clock.phase("checkpoint"):
            progress.settle()
        _save_trained(run, model, arm)
    with run.clock.phase("evaluate"):
        return evaluate_policy(run, model, arm, iterations)


def collect_arm(run: RunServices, arm: str) -> None:
    """Generates the samples that the arm needs next, unless it has begun to train on them."""
    run.console.begin(arm)
    model = _arm_model(run, arm)
    plan, progress = _begin_arm(run, model, arm)
    start = progress.start
    if start.iteration < plan.config.iterations and not start.step:
        services = training_services(run, model, arm, plan, progress)
        services.weight_sync.push(start.iteration)
        generate_and_score(services, plan, start)
    print(f"rollouts of arm {arm}: {run.folder.rollouts(arm)}")


def _arm_model(run: RunServices, arm: str) -> RemotePolicy:
    """The policy that every arm starts from."""
    with run.clock.phase("start"):
        model = run.builder.model(run.arms[arm], run.folder.checkpoint(WARMUP))
        model.freeze_reference()
        run.builder.connect(model)
    return model


def _begin_arm(run: RunServices, model: RemotePolicy, arm: str) -> tuple[Plan, SavedProgress]:
    """The arm's plan; the model gets its optimizer, and is at the arm's last checkpoint."""
    cfg, generation = run.cfg, run.cfg.generation
    plan = Plan(
        config=run.arms[arm],
        problems=run.data.train,
        prompts=run.data.prompts,
        sampling=cfg.sampling,
        seed=arm_seed(training_seed(cfg), arm),
        guards=run.builder.guards(model.places[0].layers),
        part_size=generation.part_size,
        lag=int(generation.one_step_off),
        keeps_stale=generation.stale == "correct",
    )
    with run.clock.phase("start"):
        model.start_training(plan.total_steps)
    rollouts, keeps_reference = RolloutStore(run.folder.rollouts(arm)), plan.config.reference == "ema"
    progress = _resumed(run, model, arm, keeps_reference=keeps_reference, rollouts=rollouts)
    check_arm(cfg, run.folder, arm, progress.start.iteration, is_within=progress.start.step > 0)
    return plan, progress


# --- where a stage resumes ----------------------------------------------------------------------------------------


def _resumed(run: RunServices, model: RemotePolicy, stage: str, **more: Any) -> SavedProgress:
    """Loads the stage's last checkpoint into the model. What trains then cuts the metrics to that place: ``collect``,
    which looks at every arm, would cut away what another one has logged."""
    from nemo_edo.run.resume import SavedProgress

    progress = SavedProgress(run, model, stage, **more)
    with run.clock.phase("checkpoint"):
        progress.resume()
    return progress


def _save_trained(run: RunServices, model: RemotePolicy, stage: str) -> None:
    from nemo_edo.run.resume import require_finite

    with run.clock.phase("checkpoint"):
        require_finite(model, "at the end of the training")
        model.workers.call(Worker.save, run.folder.checkpoint(stage), run.log.mark)


def _load_trained(run: RunServices, model: RemotePolicy, stage: str) -> bool:
    """Whether the stage's training was finished already, but not its evaluation: then the model gets its weights."""
    from nemo_edo.megatron import checkpoint

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


# --- files that a resumed run or a reader still needs, checked before any work --------------------------------------


def check_trained(cfg: RunConfig, folder: RunFolder, name: str, *, final: bool = False) -> None:
    """``check_arm`` of an arm that has been trained to its end, be it early: then the evaluation there is done, too.
    final: the whole stage has been finished."""
    if final and cfg.algorithm != NONE:
        _check_checkpoint(folder.checkpoint(name))
    trained = trained_iterations(cfg, folder, name)
    is_early = trained < final_iteration(cfg, name)
    check_arm(cfg, folder, name, trained, is_within=is_early, final=final, explores=False)


def check_arm(
    cfg: RunConfig, folder: RunFolder, name: str, iteration: int, *, is_within: bool = False, final: bool = False,
    explores: bool = True,
) -> None:  # fmt: skip
    """Raises UserError where a policy or a result is missing or damaged that an arm has left before it resumes at an
    iteration (within it: at a step of it, so that its evaluation is done), final: and at its end. explores: whether it
    needs the responses that the exploration term runs over. Warns of other responses that are."""
    done, arms = evaluated(cfg, name, iteration + is_within), arm_configs(cfg)
    for path in [folder.evaluation(name), folder.test_time(name)] if final else []:
        load_evaluation(path)
    for t in done:
        load_evaluation(folder.evaluation(name, t))
    for best in folder.best_checkpoints(name):
        _check_checkpoint(best)
    rollouts = RolloutStore(folder.rollouts(name))
    of_rollouts = range(iteration) if name in arms else ()
    if explores and of_rollouts and iteration < arms[name].iterations:
        explored = arms[name].explored_iteration(iteration + is_within)
        for path in rollouts.lost({explored} & set(range(iteration + is_within))):
            raise UserError(f"{path} is missing or damaged, and the exploration term runs over it; {RESTORE}")
    lost = rollouts.lost(of_rollouts)
    for kind in kinds(cfg.evaluation, final=final):
        at = [*(done if kind in KINDS else ()), *([final_iteration(cfg, name)] if final else [])]
        lost += RolloutStore(folder.evaluated(name, kind)).lost(at)
    for path in lost:
        warnings.warn(
            f"{path} is missing or damaged; training and results no longer need it; restore it from a copy if you do",
            stacklevel=2,
        )


def evaluated(cfg: RunConfig, name: str, before: int) -> list[int]:
    """The iterations below ``before`` with a short evaluation."""
    every = cfg.evaluation.every
    return [t for t in range(before) if t % every == 0] if every and name != WARMUP else []


def _check_checkpoint(folder: Path) -> None:
    try:
        workers().call(Worker.check_checkpoint, folder)
    except DamagedCheckpoint as error:
        raise UserError(f"{error}; {RESTORE}") from error
