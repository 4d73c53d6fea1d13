"""A run's stages: the warm-up, each arm's training, their evaluations. Each is done once, and goes on where it was."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

import torch

from nemo_edo import factory
from nemo_edo.algorithms.ahead import Ahead, InBackground
from nemo_edo.algorithms.iteration import Iteration, collect_iteration, draw_ahead, run_iterations
from nemo_edo.algorithms.sampling import sampling_requests
from nemo_edo.algorithms.supervised import train_supervised
from nemo_edo.config import LoopConfig, RunConfig
from nemo_edo.data.drawing import Draw, DrawnInParts
from nemo_edo.data.rollout_store import RolloutStore, tokenizer_identity
from nemo_edo.errors import RunStopped, StoppedByGuard
from nemo_edo.evaluation.comparison import START as WARMUP
from nemo_edo.evaluation.comparison import Evaluation, newly_solved_and_lost
from nemo_edo.evaluation.run import KINDS, Evaluator
from nemo_edo.evaluation.run_record import load_evaluation
from nemo_edo.evaluator_run import analyse_arm
from nemo_edo.generation.alone import DrawsAlone
from nemo_edo.generation.served_model import ServedModel
from nemo_edo.megatron import checkpoint
from nemo_edo.megatron.checksums import DamagedCheckpoint
from nemo_edo.megatron.kernels import kernels
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
from nemo_edo.parallel.main_rank import on_main
from nemo_edo.progress import AheadOnMain, SavedProgress, SharedRolloutStore, StopSignal
from nemo_edo.run_folder import MetricsLog, RunFolder
from nemo_edo.summary import SOLUTION_COLUMNS, examples, solution_rows
from nemo_edo.tracking import log_table
from nemo_edo.types import GenerationRequest, ScoredRollout

if TYPE_CHECKING:
    from nemo_edo.generation.server_engine import ServerEngine


UNTRAINED = -1
"""The version of weights before the warm-up."""


@dataclass(frozen=True)
class Job:
    """What every stage of a run needs."""

    cfg: RunConfig
    arms: dict[str, LoopConfig]
    folder: RunFolder
    data: factory.Data
    trainer: object
    log: MetricsLog
    is_main: bool
    stop: StopSignal
    servers: ServerEngine | None
    """What all stages draw responses from; None: each from its own model."""


def stage(job: Job, name: str, work: Callable[[], list]) -> None:
    """Does a stage unless it is done: its checkpoint, its evaluation and its samples are on disk when it is noted."""
    if name not in on_main(job.folder.journal):
        if job.stop.agreed():
            raise RunStopped(f"asked to stop before {name} was begun")
        begun = job.log.elapsed
        try:
            scored = work()
        except StoppedByGuard as stopped:
            raise StoppedByGuard(f"{name}, {stopped}") from stopped
        if job.is_main:
            job.folder.write_json(f"samples/{name}.json", examples(job.data.test, scored))
            seconds = round(job.log.elapsed - begun, 1)
            job.folder.note(name, metrics_bytes=job.log.size, seconds=seconds)
    if job.is_main:
        job.folder.remove_progress(name)
    torch.distributed.barrier()


def warm_up(job: Job) -> list:
    cfg = job.cfg
    model = factory.build_model(cfg, job.folder, cfg.sft, job.trainer)
    _say_kernels(job, model)
    _connect(job, model)
    if not _load_trained(job, model, WARMUP):
        if cfg.sft.steps:
            model.weight_sync.push(UNTRAINED)  # whether weights reach the engine is better known now than later
            model.weight_sync.release()
            model.start_training(cfg.sft.steps)
            progress = _resumed(job, model, WARMUP)
            train_supervised(
                model,
                job.data.solutions,
                cfg.sft,
                pad_id=job.data.pad_id,
                seed=cfg.seed,
                log=_named(job.log, WARMUP),
                bar=job.is_main,
                progress=progress,
                guards=cfg.guards,
            )
            progress.settle()
        else:
            _cut_metrics(job, None)
        _save_trained(job, model, WARMUP)
    return evaluate_policy(job, model, WARMUP, 0)


def as_it_is(job: Job) -> list:
    """Of a run that trains nothing: its model evaluated."""
    _cut_metrics(job, None)
    return evaluate_policy(job, untrained_model(job), WARMUP, 0)


def untrained_model(job: Job) -> MegatronGPTModel | ServedModel:
    """The model of a run that trains nothing, behind the run's servers or in this process."""
    if job.servers is not None:
        return ServedModel(job.servers)
    model = factory.build_model(job.cfg, job.folder, job.cfg.sft, job.trainer)
    _say_kernels(job, model)
    return model


def _say_kernels(job: Job, model: MegatronGPTModel) -> None:
    if job.is_main:
        used = kernels(model.built.chunks)
        print("computed with: " + ", ".join(f"{part} {what}" for part, what in used.items()))
        job.folder.write_json("kernels.json", used)


def train_arm(job: Job, arm: str) -> list:
    settings = job.arms[arm]
    model = _arm_model(job, settings)

    def short_evaluation(t: int) -> None:
        every = job.cfg.evaluation.every
        if every and t % every == 0 and t < settings.iterations:
            evaluate_policy(job, model, arm, t, final=False)

    if not _load_trained(job, model, arm):
        iteration = _iteration(job, model, arm)
        try:
            run_iterations(iteration, short_evaluation)
        except (RunStopped, StoppedByGuard):  # in an evaluation, say: the training before it is not lost
            iteration.progress.settle()
            raise
        iteration.progress.settle()
        _save_trained(job, model, arm)
    return evaluate_policy(job, model, arm, settings.iterations)


def collect_arm(job: Job, arm: str) -> None:
    """Draws what the arm draws next, if it has not begun to train on it."""
    iteration = _iteration(job, _arm_model(job, job.arms[arm]), arm)
    start = iteration.progress.start
    if start.iteration < iteration.config.iterations and not start.step:
        collect_iteration(iteration, start)
    if job.is_main:
        print(f"rollouts of arm {arm}: {job.folder.rollouts(arm)}")


def _arm_model(job: Job, settings: LoopConfig) -> MegatronGPTModel:
    """The policy that every arm starts from."""
    start = job.folder.checkpoint(WARMUP)
    model = factory.build_model(job.cfg, job.folder, settings, job.trainer, weights=start)
    model.freeze_reference()
    _connect(job, model)
    return model


def _connect(job: Job, model: MegatronGPTModel) -> None:
    """Gives the model what draws responses, and what brings its weights there."""
    model.engine = factory.build_engine(job.cfg, model, job.data, job.servers)
    model.weight_sync = factory.build_weight_sync(job.cfg, job.folder, model, model.engine)


def _iteration(job: Job, model: MegatronGPTModel, arm: str) -> Iteration:
    """Algorithm 1 of an arm, where it stands."""
    cfg, data, settings = job.cfg, job.data, job.arms[arm]
    iteration = Iteration(
        policy=model,
        engine=model.engine,
        weight_sync=model.weight_sync,
        scorer=data.scorer,
        store=SharedRolloutStore(job.folder.rollouts(arm), tokenizer=tokenizer_identity(data.tokenizer)),
        problems=data.train,
        prompts=data.prompts,
        objective=factory.build_objective(cfg, settings, data),
        sampling=cfg.sampling,
        seed=cfg.seed,
        log=_named(job.log, arm),
        write_rollouts=job.is_main,
        bar=arm if job.is_main else None,
        part_size=cfg.generation.part_size,
        given=factory.given_rollouts(cfg, arm, data),
        guards=cfg.guards,
        keeps_stale=cfg.generation.stale == "correct",
        lag=int(cfg.generation.one_step_off),
    )
    if cfg.generation.one_step_off:
        iteration = replace(iteration, ahead=_drawn_ahead(iteration))
    model.start_training(iteration.total_steps)
    return replace(iteration, progress=_resumed(job, model, arm, keeps_reference=settings.reference == "ema"))


def _drawn_ahead(iteration: Iteration) -> Ahead:
    """Draws on the first rank alone, in a thread."""
    store = RolloutStore(iteration.store.folder, tokenizer=iteration.store.tokenizer)

    def draw(t: int, stop: Event) -> dict[str, float]:
        alone = replace(iteration, store=store, engine=DrawsAlone(iteration.engine, stop), bar=None)
        return draw_ahead(alone, t, stop)

    return AheadOnMain(InBackground(draw))


# --- where a stage stands -----------------------------------------------------------------------------------------


def _resumed(job: Job, model: MegatronGPTModel, stage: str, **settings: Any) -> SavedProgress:
    """Puts the model where the stage's last checkpoint has it, and the metrics with it."""
    progress = SavedProgress(
        model,
        job.folder.progress(stage),
        job.cfg.checkpoint,
        stop=job.stop,
        metrics_size=lambda: job.log.size,
        failure=lambda step: job.folder.failure(stage, step),
        **settings,
    )
    progress.resume()
    _cut_metrics(job, progress.metrics_bytes)
    return progress


def _save_trained(job: Job, model: MegatronGPTModel, stage: str) -> None:
    checkpoint.save(model.policy, job.folder.checkpoint(stage), extra={"metrics_bytes": job.log.size})


def _load_trained(job: Job, model: MegatronGPTModel, stage: str) -> bool:
    """Whether the stage's training was finished already, but not its evaluation: then the model has its weights."""
    folder = job.folder.checkpoint(stage)
    if not on_main(folder.is_dir):
        return False
    try:
        checkpoint.load(model.policy, folder)
    except DamagedCheckpoint as error:
        if job.is_main:
            warnings.warn(f"{error}; training on from before it", stacklevel=2)
        return False
    _cut_metrics(job, checkpoint.load_extra(folder)["metrics_bytes"])
    return True


def _cut_metrics(job: Job, size: int | None) -> None:
    """Takes back what was logged behind the place that the run goes on from; None: the end of the last stage."""
    journal = on_main(job.folder.journal)
    last = [notes["metrics_bytes"] for notes in journal.values()][-1]
    on_main(lambda: job.log.cut(last if size is None else size))


# --- evaluation ---------------------------------------------------------------------------------------------------


def evaluate_policy(
    job: Job, model: MegatronGPTModel | ServedModel, arm: str, iteration: int, *, final: bool = True
) -> list:
    """Evaluates, logs, and where it is the final one keeps the per-problem results, and what more compute at test time
    makes of the responses; returns scored responses."""
    cfg, data = job.cfg, job.data
    if model.engine is None:
        _connect(job, model)
    evaluator = Evaluator(
        policy=None if isinstance(model, ServedModel) else model,
        engine=model.engine,
        scorer=data.scorer,
        problems=data.test,
        prompts=data.prompts,
        config=cfg.evaluation,
        max_new_tokens=cfg.sampling.max_new_tokens,
        pad_id=data.pad_id,
        keeping=partial(_keeping, job, arm, iteration),
    )
    model.weight_sync.push(iteration)
    rollouts = cfg.evaluation.rollouts if final else 1
    # The same random numbers for every arm and iteration: differences between them are the policies' own.
    requests = sampling_requests(data.test, data.prompts, rollouts * cfg.evaluation.samples, cfg.seed, "evaluate")
    begun = time.monotonic()
    evaluation, scored = evaluator.evaluate(arm, requests, rollouts)
    seconds = time.monotonic() - begun
    if final:
        model.weight_sync.release()
    _keep_best(job, model, evaluation, iteration)
    metrics = evaluation.means(resamples=cfg.evaluation.bootstrap, seed=cfg.seed)
    _say_judge(job, arm, iteration)
    changes = _changes(job, evaluation, iteration) if job.is_main else {}
    clocks = {"evaluation_s": seconds}
    job.log("evaluation", arm=arm, iteration=iteration, final=final, metrics=metrics, **changes, time=clocks)
    if job.is_main:
        job.folder.write_evaluation(evaluation, None if final else iteration)
        for note in analyse_arm(job.folder, cfg, arm)[1] if final else ():
            print(note)
        log_table(
            job.trainer,
            f"{arm}/evaluation/solutions",
            SOLUTION_COLUMNS,
            solution_rows(data.test, scored, arm, iteration),
            step=iteration,
        )
    return scored


def _say_judge(job: Job, arm: str, iteration: int) -> None:
    """What a judge was asked since the last evaluation, and whether rules say the same."""
    judge = job.data.judge
    if judge is None:
        return
    report = judge.take_report()
    print(report.in_words(judge.settings))
    job.log("judge", arm=arm, iteration=iteration, **report.numbers(judge.settings))


def discard_evaluated(job: Job, arm: str, iteration: int) -> None:
    """Responses of an evaluation that came to its end are not those of the next one."""
    for kind in KINDS:
        store = RolloutStore(job.folder.evaluated(arm, kind))
        on_main(partial(store.discard_finished, iteration))


def _keeping(job: Job, arm: str, iteration: int, kind: str, draw: Draw) -> Draw:
    """A way to draw an evaluation's responses that goes on where an earlier process was killed."""
    store = SharedRolloutStore(job.folder.evaluated(arm, kind), tokenizer=tokenizer_identity(job.data.tokenizer))

    def stop_if_asked() -> None:
        if job.stop.agreed():
            raise RunStopped(f"asked to stop: what was drawn to evaluate {arm} is saved")

    def draw_and_keep(requests: Sequence[GenerationRequest]) -> list[ScoredRollout]:
        size = job.cfg.generation.part_size
        in_parts = DrawnInParts(store, iteration, draw, part_size=size, writes=job.is_main, before_part=stop_if_asked)
        drawn = in_parts(requests)
        if job.is_main:
            store.write(iteration, drawn, rank=0, world_size=1)
        return drawn

    return draw_and_keep


def _changes(job: Job, evaluation: Evaluation, iteration: int) -> dict[str, float]:
    """Test problems that an arm has newly solved and lost, since its start and since its last evaluation. The earlier
    evaluations are read from disk: a run that was killed in between has them, too."""
    arm = evaluation.arm
    if arm == WARMUP:
        return {}
    earlier = {"": job.folder.evaluation(WARMUP), "_since_last": job.folder.evaluation_before(arm, iteration)}
    return {
        name + suffix: number
        for suffix, path in earlier.items()
        for name, number in newly_solved_and_lost(load_evaluation(path), evaluation).items()
    }


def _keep_best(job: Job, model: MegatronGPTModel, evaluation: Evaluation, iteration: int) -> None:
    """Keeps an arm's policy if it is better than what was kept, by the chosen metric."""
    metric = job.cfg.checkpoint.best
    if metric is None or evaluation.arm == WARMUP:
        return
    folder = job.folder.best_checkpoint(evaluation.arm)
    sums, counts = evaluation.metrics[metric]
    value = float(sums.sum() / counts.sum())
    kept = on_main(lambda: checkpoint.load_extra(folder) if folder.is_dir() else None)
    if kept is None or kept["metric"] != metric or value > kept["value"]:
        checkpoint.save(model.policy, folder, extra={"metric": metric, "value": value, "iteration": iteration})


def _named(log: MetricsLog, arm: str):
    return lambda kind, **values: log(kind, arm=arm, **values)
