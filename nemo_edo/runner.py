"""The main job: a warm-up, then one training for each arm from the same start, evaluations, and the report."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nemo_edo import factory
from nemo_edo.algorithms.iteration import Iteration, collect_iteration, run_iterations
from nemo_edo.algorithms.sampling import sampling_requests
from nemo_edo.algorithms.supervised import train_supervised
from nemo_edo.config import LoopConfig, RunConfig
from nemo_edo.configuration import arm_configs, compose_run, resolved_yaml
from nemo_edo.data.rollout_store import tokenizer_identity
from nemo_edo.errors import RunStopped, UserError
from nemo_edo.evaluation.comparison import START as WARMUP
from nemo_edo.evaluation.comparison import Evaluation, newly_solved_and_lost
from nemo_edo.evaluation.conclusions import conclusions, terminal_table
from nemo_edo.evaluation.report import write_report
from nemo_edo.evaluation.run import Evaluator
from nemo_edo.evaluation.run_record import compare_run, load_evaluation, read_run
from nemo_edo.megatron import checkpoint, platform
from nemo_edo.megatron.build import device_and_groups, export_hf_folder
from nemo_edo.megatron.checksums import DamagedCheckpoint
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
from nemo_edo.parallel.main_rank import is_main, on_main
from nemo_edo.progress import SavedProgress, SharedRolloutStore, StopSignal
from nemo_edo.refit.in_process import InProcessSync
from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.run_folder import METRICS, MetricsLog, RunFolder, check_arm_names
from nemo_edo.summary import arm_label, examples, side_by_side, summary
from nemo_edo.tracking import check_settings, log_numbers, start_tracking

__all__ = ["arm_label", "collect", "evaluate", "export", "train"]


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


def train(cfg: RunConfig) -> Path:
    """Runs the config and returns the run's folder. Every check of the input comes before any work on a model.

    An unfinished run of the same config goes on where it was. Raises RunStopped where it is asked to stop (SIGTERM).
    """
    with StopSignal() as stop:
        job = _prepare(cfg, stop)
        try:
            _run_stages(job)
        finally:
            job.folder.close()
    return job.folder.path


def collect(cfg: RunConfig, arm: str | None) -> None:
    """The warm-up, and then the responses alone that the arms (None: all) draw next. ``train`` goes on from there, and
    another run can train on them (``train.rollouts``)."""
    with StopSignal() as stop:
        job = _prepare(cfg, stop)
        try:
            if arm is not None and arm not in job.arms:
                raise UserError(f"the config has no arm {arm!r}; it has {', '.join(job.arms)}")
            _stage(job, WARMUP, lambda: _warm_up(job))
            for name in [arm] if arm else job.arms:
                if name not in job.folder.journal():
                    _collect_arm(job, name)
        finally:
            job.folder.close()


def evaluate(run: Path, arm: str | None, overrides: list[str]) -> None:
    """Evaluates a run's trained arms anew (``overrides`` of evaluation.*), and writes its report again."""
    strange = [override for override in overrides if not override.startswith("evaluation.")]
    if strange:
        raise UserError(f"evaluate takes overrides of evaluation.* only, not {', '.join(strange)}")
    folder, cfg = _open(run, overrides)
    trained = arm_configs(cfg)
    names = [arm] if arm else [WARMUP, *trained]
    for name in names:
        folder.require_arm(name, [WARMUP, *trained])
    platform.init_process_group(platform.enter(cfg.threads))
    data = factory.load_data(cfg, folder)
    log = MetricsLog(folder.path / METRICS, log_numbers(None), writes=is_main())
    job = Job(cfg, trained, folder, data, None, log, is_main(), StopSignal())
    for name in names:
        model = factory.build_model(cfg, folder, trained.get(name, cfg.grpo))
        checkpoint.load(model.policy, folder.checkpoint(name))
        _evaluate(job, model, name, trained[name].iterations if name in trained else 0)
    if job.is_main:
        _conclude(folder)


def export(run: Path, out: Path, arm: str | None) -> None:
    """Writes a trained policy as a Hugging Face folder. ``arm``: needed where the run has several and none of them
    is the config's own section as it is. ARM.best: the policy that was best by ``checkpoint.best``."""
    folder, cfg = _open(run, [])
    arms = arm_configs(cfg)
    if arm is None:
        own = [name for name in arms if not cfg.arms.get(name)]
        if len(arms) != 1 and len(own) != 1:
            raise UserError(f"{run} has the arms {', '.join(arms)}: choose one with --arm")
        arm = own[0] if own else next(iter(arms))
    best = [f"{name}.best" for name in arms if folder.best_checkpoint(name).is_dir()]
    folder.require_arm(arm, [WARMUP, *arms, *best])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already and is not an empty folder")
    model = factory.build_model(cfg, folder, arms.get(arm.removesuffix(".best"), cfg.grpo))
    checkpoint.load(model.policy, folder.checkpoint(arm))
    export_hf_folder(model.built, out)
    if is_main():
        print(f"the policy of arm {arm} is in {out}")


# --- stages -------------------------------------------------------------------------------------------------------


def _prepare(cfg: RunConfig, stop: StopSignal) -> Job:
    arms = arm_configs(cfg)
    check_arm_names(arms)
    check_settings(cfg.exp_manager)
    folder = RunFolder(Path(cfg.output_dir) / cfg.name)
    config = resolved_yaml(cfg)
    folder.check_free(config)
    device_and_groups(cfg.parallelism, cfg.seed, cfg.threads)
    factory.check_model(cfg)
    data = factory.load_checked_data(cfg, folder, arms.values())
    for arm, settings in arms.items():
        given = factory.given_rollouts(cfg, arm, data)
        if given is not None:
            given.require(settings.iterations)
    torch.distributed.barrier()  # every rank has looked at the folder before it changes
    on_main(lambda: _open_folder(folder, config))
    trainer = start_tracking(cfg.exp_manager, folder.logs)
    on_main(lambda: _write_files(cfg, folder))
    if is_main() and data.skipped_rows:
        print(f"{data.skipped_rows} bad rows of the problems files were left out")
    log = MetricsLog(folder.path / METRICS, log_numbers(trainer), writes=is_main())
    return Job(cfg, arms, folder, data, trainer, log, is_main(), stop)


def _open_folder(folder: RunFolder, config: str) -> None:
    if folder.is_begun:
        done = [stage for stage in folder.journal() if stage != "files"]
        print(f"going on with the unfinished run in {folder.path} (done: {', '.join(done) or 'nothing'})")
    earlier = folder.open(config)
    if earlier:
        print(f"the earlier run of this config is kept as {earlier}")


def _write_files(cfg: RunConfig, folder: RunFolder) -> None:
    if "files" not in folder.journal():
        factory.write_builtin_files(cfg, folder)
        folder.note("files", metrics_bytes=0)


def _run_stages(job: Job) -> None:
    stages = [WARMUP, *job.arms]
    _stage(job, WARMUP, lambda: _warm_up(job))
    for arm in job.arms:
        _stage(job, arm, lambda arm=arm: _train_arm(job, arm))
    if job.is_main:
        journal = job.folder.journal()
        of_arms = {name: job.folder.read_json(f"samples/{name}.json") for name in stages}
        job.folder.write_json("samples.json", side_by_side(job.data.test, of_arms))
        seconds = {"total_s": round(job.log.elapsed, 1), **{name: journal[name]["seconds"] for name in stages}}
        job.folder.write_json("summary.json", summary(job.cfg, job.arms, job.data.skipped_rows, seconds))
        _conclude(job.folder)
        job.folder.note("report", metrics_bytes=job.log.size)
    torch.distributed.barrier()


def _stage(job: Job, name: str, work: Callable[[], list]) -> None:
    """Does a stage unless it is done: its checkpoint, its evaluation and its samples are on disk when it is noted."""
    if name not in on_main(job.folder.journal):
        if job.stop.agreed():
            raise RunStopped(f"asked to stop before {name} was begun")
        begun = job.log.elapsed
        scored = work()
        if job.is_main:
            job.folder.write_json(f"samples/{name}.json", examples(job.data.test, scored))
            seconds = round(job.log.elapsed - begun, 1)
            job.folder.note(name, metrics_bytes=job.log.size, seconds=seconds)
    if job.is_main:
        job.folder.remove_progress(name)
    torch.distributed.barrier()


def _warm_up(job: Job) -> list:
    cfg = job.cfg
    model = factory.build_model(cfg, job.folder, cfg.sft, job.trainer)
    if not _load_trained(job, model, WARMUP):
        if cfg.sft.steps:
            model.start_training(cfg.sft.steps)
            train_supervised(
                model,
                job.data.solutions,
                cfg.sft,
                pad_id=job.data.pad_id,
                seed=cfg.seed,
                log=_named(job.log, WARMUP),
                bar=job.is_main,
                progress=_resumed(job, model, WARMUP),
            )
        else:
            _cut_metrics(job, None)
        _save_trained(job, model, WARMUP)
    return _evaluate(job, model, WARMUP, 0)


def _train_arm(job: Job, arm: str) -> list:
    settings = job.arms[arm]
    model = _arm_model(job, settings)

    def short_evaluation(t: int) -> None:
        every = job.cfg.evaluation.every
        if every and t % every == 0 and t < settings.iterations:
            _evaluate(job, model, arm, t, final=False)

    if not _load_trained(job, model, arm):
        run_iterations(_iteration(job, model, arm), short_evaluation)
        _save_trained(job, model, arm)
    return _evaluate(job, model, arm, settings.iterations)


def _collect_arm(job: Job, arm: str) -> None:
    """Draws what the arm draws next, if it has not begun to train on it."""
    iteration = _iteration(job, _arm_model(job, job.arms[arm]), arm)
    start = iteration.progress.start
    if start.iteration < iteration.config.iterations and not start.step:
        collect_iteration(iteration, start)
    if job.is_main:
        print(f"rollouts of arm {arm}: {job.folder.rollouts(arm)}")


def _arm_model(job: Job, settings: LoopConfig) -> MegatronGPTModel:
    """The policy that every arm starts from."""
    model = factory.build_model(job.cfg, job.folder, settings, job.trainer)
    checkpoint.load(model.policy, job.folder.checkpoint(WARMUP))
    model.freeze_reference()
    model.engine = factory.build_engine(job.cfg, model, job.data)
    return model


def _iteration(job: Job, model: MegatronGPTModel, arm: str) -> Iteration:
    """Algorithm 1 of an arm, where it stands."""
    cfg, data, settings = job.cfg, job.data, job.arms[arm]
    iteration = Iteration(
        policy=model,
        engine=model.engine,
        weight_sync=InProcessSync(model.engine),
        scorer=ExactAnswerScorer(),
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
    )
    model.start_training(iteration.total_steps)
    return replace(iteration, progress=_resumed(job, model, arm, keeps_reference=settings.reference == "ema"))


# --- where a stage stands -----------------------------------------------------------------------------------------


def _resumed(job: Job, model: MegatronGPTModel, stage: str, **settings: Any) -> SavedProgress:
    """Puts the model where the stage's last checkpoint has it, and the metrics with it."""
    progress = SavedProgress(
        model,
        job.folder.progress(stage),
        job.cfg.checkpoint,
        stop=job.stop,
        metrics_size=lambda: job.log.size,
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


def _evaluate(job: Job, model: MegatronGPTModel, arm: str, iteration: int, *, final: bool = True) -> list:
    """Evaluates, logs, and where it is the final one keeps the per-problem results; returns scored responses."""
    cfg, data = job.cfg, job.data
    engine = model.engine or factory.build_engine(cfg, model, data)
    evaluator = Evaluator(
        policy=model,
        engine=engine,
        scorer=ExactAnswerScorer(),
        problems=data.test,
        prompts=data.prompts,
        config=cfg.evaluation,
        max_new_tokens=cfg.sampling.max_new_tokens,
        pad_id=data.pad_id,
    )
    rollouts = cfg.evaluation.rollouts if final else 1
    # The same random numbers for every arm and iteration: differences between them are the policies' own.
    requests = sampling_requests(data.test, data.prompts, rollouts * cfg.evaluation.samples, cfg.seed, "evaluate")
    evaluation, scored = evaluator.evaluate(arm, requests, rollouts)
    _keep_best(job, model, evaluation, iteration)
    intervals = {
        name: evaluation.interval(name, resamples=cfg.evaluation.bootstrap, seed=cfg.seed)
        for name in evaluation.metrics
    }
    metrics = {name: {"mean": i.mean, "low": i.low, "high": i.high} for name, i in intervals.items()}
    changes = {}
    if job.is_main and arm != WARMUP:
        changes = newly_solved_and_lost(load_evaluation(job.folder.evaluation(WARMUP)), evaluation)
    job.log("evaluation", arm=arm, iteration=iteration, final=final, metrics=metrics, **changes)
    if final and job.is_main:
        job.folder.write_evaluation(evaluation)
    return scored


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


# --- records ------------------------------------------------------------------------------------------------------


def _conclude(folder: RunFolder) -> None:
    """The table and the conclusions on the terminal, and the report."""
    comparison = compare_run(read_run(folder.path))
    print(f"\n{terminal_table(comparison)}\n")
    for sentence in conclusions(comparison):
        print(f"- {sentence}")
    print(f"\nreport: {write_report(folder.path)}")


# --- small things -------------------------------------------------------------------------------------------------


def _open(run: Path, overrides: list[str]) -> tuple[RunFolder, RunConfig]:
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is not the folder of a run: it has no config.yaml")
    return RunFolder(run), compose_run("config", overrides, config_dir=run)


def _named(log: MetricsLog, arm: str):
    return lambda kind, **values: log(kind, arm=arm, **values)
