"""The main job: a warm-up, then one training for each arm from the same start, evaluations, and the report."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Any

from nemo_edo.config import NONE, LoopConfig, RunConfig
from nemo_edo.config.arms import REPLICATE
from nemo_edo.config.compose import arm_configs, resolved_yaml
from nemo_edo.errors import UserError
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run import build, inputs
from nemo_edo.run.console import RunConsole
from nemo_edo.run.control import control_folder
from nemo_edo.run.early_stop import early_stop
from nemo_edo.run.evaluate_stored import evaluate_stored
from nemo_edo.run.folder import METRICS, RunFolder, check_arm_names
from nemo_edo.run.metrics_log import MetricsLog
from nemo_edo.run.policy_evaluation import evaluate_policy
from nemo_edo.run.replay import replay
from nemo_edo.run.stages import (
    WARMUP,
    Job,
    collect_arm,
    evaluate_untrained,
    stage,
    train_arm,
    untrained_model,
    warm_up,
)
from nemo_edo.run.stall import StallWatch
from nemo_edo.run.stop_signal import StopSignal
from nemo_edo.run.stored_run import StoredRun, final_iteration, open_run
from nemo_edo.run.summary import examples, side_by_side, summary
from nemo_edo.run.tracking import check_settings, log_numbers, start_tracking
from nemo_edo.utils.files import read_object, temporary_name
from nemo_edo.utils.garbage import large_imports
from nemo_edo.utils.phases import PhaseClock
from nemo_edo.utils.wording import did_you_mean
from nemo_edo.worker.dispatch import workers
from nemo_edo.worker.worker import Worker

SENTENCES = 5
"""Of a report's conclusions that the terminal shows."""

__all__ = ["collect", "evaluate", "evaluate_model", "export", "replay", "train"]


def train(cfg: RunConfig, begun: float | None = None, *, page: bool = True) -> Path:
    """Runs the config and returns the run's folder. Every check of the input comes before any work on a model.

    An unfinished run of the same config resumes. Raises RunStopped where it is asked to stop (SIGTERM).
    begun: the monotonic clock when the command began, where that was before this call. page: whether to write the
    report of this run alone.
    """
    clock = PhaseClock(begun=begun)
    with _stop_signal(cfg) as stop:
        with clock.phase("start"), large_imports():
            job = _prepare(cfg, stop, clock)
        try:
            stage(job, WARMUP, lambda: evaluate_untrained(job) if cfg.algorithm == NONE else warm_up(job))
            for arm in job.arms:
                stage(job, arm, lambda arm=arm: train_arm(job, arm))
            job.console.close()
            _finish(job, page)
        finally:
            _close(job)
    return job.folder.path


def evaluate_model(cfg: RunConfig) -> list[str]:
    """Evaluates a model that this package need not have trained, as a separate run; returns what there is to print.

    An unfinished run resumes. A finished one generates nothing again: the same seed gives the same responses.
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
    return evaluate_stored([folder.path], None, [])


def collect(cfg: RunConfig, arm: str | None) -> None:
    """The warm-up, and then only the responses that the arms (None: all) need next. ``train`` resumes from there, and
    another run can train on them (``train.rollouts``)."""
    known = arm_configs(cfg)
    if not known:
        raise UserError(f"algorithm {cfg.algorithm} trains on no responses: there is nothing to generate")
    if arm is not None and arm not in known:
        raise UserError(f"the config has no arm {arm!r}{did_you_mean(arm, known)} (there are: {', '.join(known)})")
    with _stop_signal(cfg) as stop:
        job = _prepare(cfg, stop, PhaseClock())
        try:
            stage(job, WARMUP, lambda: warm_up(job))
            for name in [arm] if arm else job.arms:
                if name not in job.folder.journal():
                    collect_arm(job, name)
        finally:
            _close(job)


def evaluate(run: Path, arm: str | None, overrides: list[str]) -> None:
    """Evaluates a run's trained arms again (``overrides`` of evaluation.*), and writes its report again. An arm's
    responses are replaced once the new ones are complete; a killed evaluation of the same settings resumes."""
    strange = [override for override in overrides if not override.startswith("evaluation.")]
    if strange:
        raise UserError(f"evaluate takes overrides of evaluation.* only, not {', '.join(strange)}")
    opened = open_run(run, overrides)
    cfg, folder = opened.cfg, opened.folder
    names = [arm] if arm else opened.policies
    for name in names if cfg.algorithm != NONE else ():
        folder.require_arm(name, [*opened.policies, *opened.best_policies])
    job = _reopen(opened)
    try:
        for name in names:
            job.console.begin(name)
            model = untrained_model(job) if cfg.algorithm == NONE else build.load_policy(cfg, folder, name)
            evaluate_policy(job, model, name, final_iteration(cfg, name), anew=True)
    finally:
        job.console.close()
        if job.servers is not None:
            job.servers.close()
    _conclude(folder)


def export(run: Path, out: Path, arm: str | None, max_shard_bytes: int, adapter: bool = False) -> None:
    """Writes a trained policy as a Hugging Face folder of files of at most ``max_shard_bytes``; it appears when it is
    whole.

    arm: required where the run has several and not exactly one of them is the config's own section unchanged. ARM.best
    and so on: the policies that were best by ``checkpoint.best``. adapter: its LoRA adapters alone, as a PEFT folder;
    the weights under them, which an arm has from the warm-up, are written to its folder ``base``.
    """
    opened = open_run(run)
    folder, cfg = opened.folder, opened.cfg
    arms = arm_configs(cfg)
    if arm is None:
        arm = _only_arm(run, cfg, list(arms))
    folder.require_arm(arm, [*opened.policies, *opened.best_policies])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already and is not an empty folder")
    if out.is_mount():
        raise UserError(f"{out} is a mount point, which no folder can replace: name a folder in it")
    if adapter and not cfg.lora.rank:
        raise UserError(f"{run} trained all weights (lora.rank=0): export it without --adapter")
    model = build.load_policy(cfg, folder, arm)
    part = temporary_name(out.resolve())
    shutil.rmtree(part, ignore_errors=True)  # of a killed export
    workers = model.workers
    if adapter:
        workers.call(Worker.export, part / "base", max_shard_bytes, False)
        workers.call(Worker.export_adapters, part, str(out.resolve() / "base"))
    else:
        workers.call(Worker.export, part, max_shard_bytes, True)
    part.replace(out)
    what = "its adapters are" if adapter else "it is"
    print(f"the policy of arm {arm}: {what} in {out}")


def _only_arm(run: Path, cfg: RunConfig, arms: list[str]) -> str:
    arms = [name for name in arms if name != REPLICATE]
    own = [name for name in arms if not cfg.arms.get(name)] or arms or [WARMUP]
    if len(own) != 1:
        raise UserError(f"{run} has the arms {', '.join(arms)}: choose one with --arm")
    return own[0]


# --- before the stages --------------------------------------------------------------------------------------------


def _stop_signal(cfg: RunConfig) -> StopSignal:
    limit = cfg.cluster.stalled_after_s
    folder = control_folder() or Path(cfg.output_dir) / f"{cfg.name}.stalled"
    return StopSignal(StallWatch(limit, folder) if limit else None)


def _prepare(cfg: RunConfig, stop: StopSignal, clock: PhaseClock) -> Job:
    """Checks all input, then takes the run's folder, and starts its loggers and its servers."""
    arms = arm_configs(cfg)
    check_arm_names(arms)
    folder = RunFolder(Path(cfg.output_dir) / cfg.name)
    folder.check_free(resolved_yaml(cfg))
    _start_processes(cfg)
    check_settings(cfg.exp_manager)  # NeMo imports Megatron, which the platform has been prepared for by now
    data = _checked_data(cfg, folder, arms)
    cfg = inputs.with_seq_length(cfg, data)
    _open_folder(folder, resolved_yaml(cfg))
    trainer = start_tracking(cfg.exp_manager, folder.logs)
    _write_files(cfg, folder, data)
    if data.skipped_rows:
        print(f"{data.skipped_rows} bad rows of the problems files were left out")
    if cfg.algorithm != NONE and data.overlap:
        print(f"{len(data.overlap)} of the {len(data.test)} test problems are train problems, too (data.allow_overlap)")
    if cfg.model.path is not None:
        print(*data.stop.lines(), sep="\n")
    console = RunConsole({WARMUP: cfg.sft.steps, **{name: settings.iterations for name, settings in arms.items()}})
    log = MetricsLog(folder.path / METRICS, log_numbers(trainer), watch=console, pending=clock.pending)
    servers = None
    if any(name not in folder.journal() for name in (WARMUP, *arms)):
        servers = build.start_servers(cfg, folder, data)
    return Job(cfg, arms, folder, data, trainer, log, stop, console, servers, clock)


def _start_processes(cfg: RunConfig) -> None:
    """Connects the ranks, and checks the model that they, or the servers alone, load."""
    if build.holds_no_model(cfg):
        inputs.check_served_model(cfg)
    else:
        workers().call(Worker.begin, cfg.parallelism, cfg.seed, cfg.threads)
        inputs.check_model(cfg)
    build.check_servers(cfg)


def _checked_data(cfg: RunConfig, folder: RunFolder, arms: dict[str, LoopConfig]) -> inputs.Data:
    data = inputs.load_checked_data(cfg, folder, arms.values())
    for arm, settings in arms.items():
        given = inputs.given_rollouts(cfg, arm, data)
        if given is not None:
            given.require(settings.iterations)
    return data


def _reopen(opened: StoredRun) -> Job:
    """A finished run's job, to evaluate its policies again."""
    cfg, folder = opened.cfg, opened.folder
    workers().call(Worker.enter, cfg.threads)
    data = inputs.load_data(cfg, folder)
    cfg = inputs.with_seq_length(cfg, data)
    arms = arm_configs(cfg)
    policies = (WARMUP, *arms, *opened.best_policies)
    console = RunConsole({name: final_iteration(cfg, name) for name in policies})
    log = MetricsLog(folder.path / METRICS, log_numbers(None), watch=console)
    build.check_servers(cfg)
    build.check_refit(cfg, folder)
    servers = build.start_servers(cfg, folder, data)
    return Job(cfg, arms, folder, data, None, log, StopSignal(), console, servers, PhaseClock())


def _close(job: Job) -> None:
    job.console.close()
    if job.servers is not None:
        job.servers.close()
    job.folder.close()


def _open_folder(folder: RunFolder, config: str) -> None:
    if folder.is_begun:
        done = [stage for stage in folder.journal() if stage != "files"]
        print(f"resuming the unfinished run in {folder.path} (done: {', '.join(done) or 'nothing'})")
    earlier = folder.open(config)
    if earlier:
        print(f"the earlier run of this config is kept as {earlier}")


def _write_files(cfg: RunConfig, folder: RunFolder, data: inputs.Data) -> None:
    """The files that the run makes, again where one of them has changed: a resumed run needs what it began with."""
    from nemo_edo.megatron.checksums import checksum

    def checksums() -> dict[str, str]:
        paths = [path for part in (folder.data, folder.base) for path in sorted(part.rglob("*")) if path.is_file()]
        return {str(path.relative_to(folder.path)): checksum(path) for path in paths}

    noted = folder.journal().get("files")
    if noted is None or noted.get("checksums", checksums()) != checksums():
        for path in (*folder.data.glob("*"), *folder.base.glob("*")):
            if path.is_dir():  # all of them are files
                shutil.rmtree(path)
        inputs.write_builtin_files(cfg, folder, data.made)
        folder.note("files", metrics_bytes=0, checksums=checksums())


# --- after the stages ---------------------------------------------------------------------------------------------


def _finish(job: Job, page: bool) -> None:
    with job.clock.phase("report"):
        _write_report(job, page)
    job.log("phases", arm=[WARMUP, *job.arms][-1], time=job.clock.take())
    job.folder.note("report", **job.log.mark)


def _write_report(job: Job, page: bool) -> None:
    # What a process logged that was killed here, if anything; and it finds lines that have changed since.
    job.log.cut([*job.folder.journal().values()][-1])
    _write_summary(job)
    if page:
        _conclude(job.folder)


def _write_summary(job: Job) -> None:
    """samples.json and summary.json."""
    stages = [WARMUP, *job.arms]
    journal = job.folder.journal()
    of_arms = {name: _examples(job, name) for name in stages}
    job.folder.write_json("samples.json", side_by_side(job.data.test, of_arms))
    seconds = {"total_s": round(job.log.elapsed, 1), **{name: journal[name]["seconds"] for name in stages}}
    about = summary(job.cfg, job.arms, job.data.skipped_rows, seconds, workers().size)
    for name, settings in about["arms"].items():
        if stop := early_stop(job.cfg, job.folder, name):
            said = stop.in_words(settings["iterations"])
            about["arms"][name] = {**settings, "stopped_early": said}
    kernels = {} if build.holds_no_model(job.cfg) else job.folder.read_json("kernels.json")
    job.folder.write_json("summary.json", {**about, "kernels": kernels})


def _examples(job: Job, name: str) -> dict[str, list[dict[str, Any]]]:
    """What the stage has left of its first responses, or the same again from the stored ones."""
    try:
        return read_object(job.folder.path / "samples" / f"{name}.json", ())
    except UserError:
        store = RolloutStore(job.folder.evaluated(name, "sampled"))
        responses, samples = store.read(final_iteration(job.cfg, name)), job.cfg.evaluation.samples
        return examples(job.data.test, [one for one in responses if one.rollout.sample_index < samples])


def _conclude(folder: RunFolder) -> None:
    """The table and the first conclusions on the terminal, and the report, which has all of them."""
    from nemo_edo.report.conclusions import terminal_table
    from nemo_edo.report.page import write_report
    from nemo_edo.report.run_set import one_run

    report = write_report(one_run(folder.path))
    print(f"\n{terminal_table(report.comparison)}\n")
    for sentence in report.conclusions[:SENTENCES]:
        print(textwrap.fill(sentence, 80, initial_indent="- ", subsequent_indent="  "))
    print(f"\nreport: {report.path}")
