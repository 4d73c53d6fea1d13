"""The main job: a warm-up, then one training for each arm from the same start, evaluations, and the report."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from nemo_edo import factory
from nemo_edo.cluster.control import control_folder
from nemo_edo.cluster.stall import StallWatch
from nemo_edo.config import NONE, RunConfig
from nemo_edo.configuration import arm_configs, resolved_yaml
from nemo_edo.errors import UserError
from nemo_edo.evaluation.conclusions import conclusions, terminal_table
from nemo_edo.evaluation.report import write_report
from nemo_edo.evaluation.run_record import compare_run, read_run
from nemo_edo.evaluator_run import evaluate_stored
from nemo_edo.megatron import platform
from nemo_edo.megatron.build import device_and_groups, export_hf_folder
from nemo_edo.parallel.main_rank import is_main, on_main
from nemo_edo.progress import StopSignal
from nemo_edo.replay import replay
from nemo_edo.run_folder import METRICS, MetricsLog, RunFolder, check_arm_names
from nemo_edo.stages import (
    WARMUP,
    Job,
    as_it_is,
    collect_arm,
    discard_evaluated,
    evaluate_policy,
    stage,
    train_arm,
    untrained_model,
    warm_up,
)
from nemo_edo.stored_run import final_iteration, open_run
from nemo_edo.summary import side_by_side, summary
from nemo_edo.tracking import check_settings, log_numbers, start_tracking

__all__ = ["collect", "evaluate", "evaluate_model", "export", "replay", "train"]


def train(cfg: RunConfig) -> Path:
    """Runs the config and returns the run's folder. Every check of the input comes before any work on a model.

    An unfinished run of the same config goes on where it was. Raises RunStopped where it is asked to stop (SIGTERM).
    """
    with _stop_signal(cfg) as stop:
        job = _prepare(cfg, stop)
        try:
            _run_stages(job)
        finally:
            _close(job)
    return job.folder.path


def evaluate_model(cfg: RunConfig) -> list[str]:
    """Evaluates a model that this package need not have trained, as a run of its own; returns what there is to print.

    What an unfinished run has drawn is kept, and a finished one draws nothing anew: its seed would draw the same.
    """
    if cfg.algorithm != NONE:
        raise UserError(
            f"algorithm is {cfg.algorithm}: this config trains (nemo-edo train); evaluate takes one with algorithm "
            "none, or the folder of a run"
        )
    folder = RunFolder(Path(cfg.output_dir) / cfg.name)
    folder.check_free(resolved_yaml(cfg))
    if not folder.is_finished:
        train(cfg)
    return evaluate_stored([folder.path], None, []) if "RANK" not in os.environ or is_main() else []


def collect(cfg: RunConfig, arm: str | None) -> None:
    """The warm-up, and then the responses alone that the arms (None: all) draw next. ``train`` goes on from there, and
    another run can train on them (``train.rollouts``)."""
    with _stop_signal(cfg) as stop:
        job = _prepare(cfg, stop)
        try:
            if not job.arms:
                raise UserError(f"algorithm {cfg.algorithm} trains on no responses: there is nothing to draw")
            if arm is not None and arm not in job.arms:
                raise UserError(f"the config has no arm {arm!r}; it has {', '.join(job.arms)}")
            stage(job, WARMUP, lambda: warm_up(job))
            for name in [arm] if arm else job.arms:
                if name not in job.folder.journal():
                    collect_arm(job, name)
        finally:
            _close(job)


def evaluate(run: Path, arm: str | None, overrides: list[str]) -> None:
    """Evaluates a run's trained arms anew (``overrides`` of evaluation.*), and writes its report again. An evaluation
    of the same settings that was killed goes on."""
    strange = [override for override in overrides if not override.startswith("evaluation.")]
    if strange:
        raise UserError(f"evaluate takes overrides of evaluation.* only, not {', '.join(strange)}")
    opened = open_run(run, overrides)
    folder, cfg = opened.folder, opened.cfg
    trained = arm_configs(cfg)
    names = [arm] if arm else [WARMUP, *trained]
    for name in names if cfg.algorithm != NONE else ():
        folder.require_arm(name, [WARMUP, *trained])
    platform.init_process_group(platform.enter(cfg.threads))
    data = factory.load_data(cfg, folder)
    log = MetricsLog(folder.path / METRICS, log_numbers(None), writes=is_main())
    factory.check_servers(cfg)
    factory.check_refit(cfg, folder)
    servers = factory.start_servers(cfg, folder, data)
    job = Job(cfg, trained, folder, data, None, log, is_main(), StopSignal(), servers)
    try:
        for name in names:
            if cfg.algorithm == NONE:
                model = untrained_model(job)
            else:
                model = factory.load_policy(cfg, folder, name)
            iteration = final_iteration(cfg, name)
            discard_evaluated(job, name, iteration)
            evaluate_policy(job, model, name, iteration)
    finally:
        if servers is not None:
            servers.close()
    if job.is_main:
        _conclude(folder)


def export(run: Path, out: Path, arm: str | None, max_shard_bytes: int) -> None:
    """Writes a trained policy as a Hugging Face folder of files of at most ``max_shard_bytes``. ``arm``: needed where
    the run has several and none of them is the config's own section as it is. ARM.best: the policy that was best by
    ``checkpoint.best``."""
    opened = open_run(run)
    folder, cfg = opened.folder, opened.cfg
    arms = arm_configs(cfg)
    if arm is None:
        arm = _only_arm(run, cfg, list(arms))
    best = [f"{name}.best" for name in arms if folder.best_checkpoint(name).is_dir()]
    folder.require_arm(arm, [WARMUP, *arms, *best])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already and is not an empty folder")
    model = factory.load_policy(cfg, folder, arm)
    export_hf_folder(model.built, out, max_shard_bytes)
    if is_main():
        print(f"the policy of arm {arm} is in {out}")


def _only_arm(run: Path, cfg: RunConfig, arms: list[str]) -> str:
    own = [name for name in arms if not cfg.arms.get(name)] or arms or [WARMUP]
    if len(own) != 1:
        raise UserError(f"{run} has the arms {', '.join(arms)}: choose one with --arm")
    return own[0]


# --- stages -------------------------------------------------------------------------------------------------------


def _stop_signal(cfg: RunConfig) -> StopSignal:
    limit = cfg.cluster.stalled_after_s
    folder = control_folder() or Path(cfg.output_dir) / f"{cfg.name}.stalled"
    return StopSignal(StallWatch(limit, folder) if limit else None)


def _prepare(cfg: RunConfig, stop: StopSignal) -> Job:
    arms = arm_configs(cfg)
    check_arm_names(arms)
    check_settings(cfg.exp_manager)
    folder = RunFolder(Path(cfg.output_dir) / cfg.name)
    config = resolved_yaml(cfg)
    folder.check_free(config)
    if _holds_no_model(cfg):
        platform.init_process_group(torch.device("cpu"))  # the servers hold the only model
        factory.check_served_model(cfg)
    else:
        device_and_groups(cfg.parallelism, cfg.seed, cfg.threads)
        factory.check_model(cfg)
    factory.check_servers(cfg)
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
    servers = None
    if any(name not in on_main(folder.journal) for name in (WARMUP, *arms)):
        servers = factory.start_servers(cfg, folder, data)
    return Job(cfg, arms, folder, data, trainer, log, is_main(), stop, servers)


def _close(job: Job) -> None:
    if job.servers is not None:
        job.servers.close()
    job.folder.close()


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
    stage(job, WARMUP, lambda: as_it_is(job) if job.cfg.algorithm == NONE else warm_up(job))
    for arm in job.arms:
        stage(job, arm, lambda arm=arm: train_arm(job, arm))
    if job.is_main:
        journal = job.folder.journal()
        of_arms = {name: job.folder.read_json(f"samples/{name}.json") for name in stages}
        job.folder.write_json("samples.json", side_by_side(job.data.test, of_arms))
        seconds = {"total_s": round(job.log.elapsed, 1), **{name: journal[name]["seconds"] for name in stages}}
        about = summary(job.cfg, job.arms, job.data.skipped_rows, seconds)
        kernels = {} if _holds_no_model(job.cfg) else job.folder.read_json("kernels.json")
        job.folder.write_json("summary.json", {**about, "kernels": kernels})
        _conclude(job.folder)
        job.folder.note("report", metrics_bytes=job.log.size)
    torch.distributed.barrier()


# --- records ------------------------------------------------------------------------------------------------------


def _conclude(folder: RunFolder) -> None:
    """The table and the conclusions on the terminal, and the report."""
    comparison = compare_run(read_run(folder.path))
    print(f"\n{terminal_table(comparison)}\n")
    for sentence in conclusions(comparison):
        print(f"- {sentence}")
    print(f"\nreport: {write_report(folder.path)}")


# --- small things -------------------------------------------------------------------------------------------------


def _holds_no_model(cfg: RunConfig) -> bool:
    """Whether servers have all that is evaluated, and this process needs neither Megatron nor a GPU."""
    return cfg.algorithm == NONE and cfg.generation.is_served
