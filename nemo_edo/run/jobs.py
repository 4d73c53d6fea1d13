"""The main job: a warm-up, then one training for each arm from the same start, evaluations, and the report."""

import shutil
import textwrap
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from nemo_edo.algorithms.plan import require_several_steps
from nemo_edo.algorithms.samples import require_given
from nemo_edo.config import NONE, ParallelismConfig, RunConfig
from nemo_edo.config.compose import arm_configs, final_iteration, resolved_yaml
from nemo_edo.config.run import REPLICATE
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import Evaluation, check_arm_names, require_same_problems
from nemo_edo.generation.dispatch import limit_s
from nemo_edo.run import inputs
from nemo_edo.run.build import Builder
from nemo_edo.run.control import control_folder
from nemo_edo.run.metrics_log import MetricsLog, RunConsole
from nemo_edo.run.policy_evaluation import evaluate_policy, evaluate_stored
from nemo_edo.run.replay import replay
from nemo_edo.run.services import RunServices
from nemo_edo.run.stages import WARMUP, collect_arm, do_stage, first_model
from nemo_edo.run.stop_signal import StallWatch, StopSignal
from nemo_edo.run.stored_run import StoredRun
from nemo_edo.run.summary import kept_warnings, write_samples, write_summary
from nemo_edo.run.tracking import check_settings, hyperparameters, log_numbers, start_tracking
from nemo_edo.run_folder import EVALUATED_AGAIN, METRICS, TRACKED, NewEvaluations, RunFolder
from nemo_edo.utils.files import checksum, temporary_name
from nemo_edo.utils.memory import large_imports
from nemo_edo.utils.phases import PhaseClock
from nemo_edo.utils.wording import did_you_mean, printable
from nemo_edo.worker.dispatch import workers
from nemo_edo.worker.worker import Worker

SENTENCES = 5
"""The number of a report's conclusions that the terminal shows."""

__all__ = ["collect", "evaluate", "evaluate_model", "export", "replay", "train"]


def train(cfg: RunConfig, begun: float | None = None) -> Path:
    """Runs the config and returns the run's folder. Every check of the input comes before any work on a model.

    An unfinished run of the same config resumes. Raises RunStopped where it is asked to stop (SIGTERM).
    begun: the monotonic clock when the command began, where that was before this call.
    """
    clock = PhaseClock(begun=begun)
    with _stop_signal(cfg) as stop:
        with clock.phase("start"), large_imports():
            run = _prepare(cfg, stop, clock)
        with closing(run):
            with kept_warnings(run.folder.path, lambda: run.console.stage):
                stages = [WARMUP, *run.arms]
                for name in stages:
                    do_stage(run, name)
            run.console.close()
            with run.clock.phase("report"):
                # What a process logged that was killed here, if anything; and it finds lines that have changed since.
                run.log.cut([*run.folder.journal().values()][-1])
                write_samples(run, stages)
                write_summary(run, stages)
                _conclude(run.folder)
            run.log("phases", arm=stages[-1], time=run.clock.take())
            run.folder.note("report", **run.log.mark)
    return run.folder.path


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
    if folder.is_finished:
        inputs.require_unchanged(cfg, folder)
    else:
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
    with _stop_signal(cfg) as stop, closing(_prepare(cfg, stop, PhaseClock())) as run:
        with kept_warnings(run.folder.path, lambda: run.console.stage):
            do_stage(run, WARMUP)
            for name in [arm] if arm else known:
                if name not in run.folder.journal():
                    collect_arm(run, name)


def evaluate(opened: StoredRun, arm: str | None) -> None:
    """Evaluates a finished run's policies again, and writes its report again. What is stored is replaced once
    everything new is complete; a killed evaluation of the same settings resumes."""
    trains = opened.cfg.algorithm != NONE
    names = [arm] if arm else opened.policies
    # Responses at another temperature are no part of this evaluation.
    name = f"{arm or 'all'}_t{opened.cfg.evaluation.temperature[0]:g}"
    folder = NewEvaluations(opened.folder.path, names, name)
    if not trains and arm not in (None, WARMUP):
        raise UserError(f"{folder.path} has no arm {arm!r}: nothing was trained")
    for name in names if trains else ():
        folder.require_arm(name, [*opened.policies, *opened.best_policies])
    folder.take(finished=True)
    with closing(folder):
        workers().call(Worker.enter, opened.cfg.threads)
        data = inputs.load_data(opened.cfg, folder)
        folder.note_inputs(data.made_from.changed)
        cfg = inputs.with_seq_length(opened.cfg, data)
        about = {"temperature": cfg.evaluation.temperature[0], "samples": cfg.evaluation.samples}
        asked = Evaluation(names[0], tuple(problem.id for problem in data.test), {}, **about)
        kept = folder.evaluations(name for name in opened.policies if name not in names)
        require_same_problems({f"--arm {arm}": asked, **{str(folder.evaluation(name)): kept[name] for name in kept}})
        iterations = {name: final_iteration(cfg, name) for name in (*opened.policies, *opened.best_policies)}
        console = RunConsole(iterations)
        folder.new.mkdir(parents=True, exist_ok=True)
        metrics = shutil.copyfile(folder.path / METRICS, folder.new / METRICS)
        log, builder = MetricsLog(metrics, log_numbers(None), watch=console), Builder(cfg, folder, data)
        services = RunServices(folder, cfg, arm_configs(cfg), data, builder, log, StopSignal(), console, PhaseClock())
        with closing(console), closing(log), closing(builder):
            builder.check_servers()
            builder.check_refit()
            builder.start_servers()
            for name in names:
                console.begin(name)
                model = builder.trained(name) if trains else first_model(services)
                evaluate_policy(services, model, name, iterations[name])
        if WARMUP in names and (notes := folder.journal().get(WARMUP)):
            folder.note(WARMUP, **{**notes, EVALUATED_AGAIN: True})
        folder.put()
        _conclude(folder)


def export(
    opened: StoredRun,
    out: Path,
    arm: str | None,
    max_shard_bytes: int,
    adapter: bool = False,
    repository: str | None = None,
) -> None:
    """Writes a trained policy as a Hugging Face folder of files of at most ``max_shard_bytes``, with a model card; it
    appears when it is whole.

    arm: required where the run has several and not exactly one of them is the config's own section unchanged. ARM.best
    and so on: the policies that were best by ``checkpoint.best``. adapter: its LoRA adapters alone, as a PEFT folder;
    the weights under them, which an arm has from the warm-up, are written to its folder ``base``. repository: on the
    hub, where the folder is uploaded.
    """
    from nemo_edo.run.model_card import HubRepository, write_card

    folder, cfg = opened.folder, opened.cfg
    arms = arm_configs(cfg)
    if workers().size == 1:  # whatever layout and attention trained it
        cfg = replace(cfg, parallelism=ParallelismConfig(), model=replace(cfg.model, attention="auto"))
    if arm is None:
        trained = [name for name in arms if name != REPLICATE]
        arm, *others = [name for name in trained if not cfg.arms.get(name)] or trained or [WARMUP]
        if others:
            raise UserError(f"{folder.path} has the arms {', '.join(trained)}: choose one with --arm")
    folder.require_arm(arm, [*opened.policies, *opened.best_policies])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already and is not an empty folder")
    if out.is_mount():
        raise UserError(f"{out} is a mount point, which no folder can replace: name a folder in it")
    if adapter and not cfg.lora.rank:
        raise UserError(f"{folder.path} trained all weights (lora.rank=0): export it without --adapter")
    hub = None if repository is None else HubRepository(repository)
    model = Builder(cfg, folder).trained(arm)
    part = temporary_name(out.resolve())
    shutil.rmtree(part, ignore_errors=True)  # of a killed export
    if adapter:
        model.workers.call(Worker.export, part / "base", max_shard_bytes, False)
        model.workers.call(Worker.export_adapters, part, str(out.resolve() / "base"))
    else:
        model.workers.call(Worker.export, part, max_shard_bytes, True)
    write_card(part, opened, arm, name=out.name, adapter=adapter)
    part.replace(out)
    what = "its adapters are" if adapter else "it is"
    print(f"the policy of arm {arm}: {what} in {out}")
    if hub is not None:
        print(f"uploaded to {hub.upload(out)}")


# --- before the stages --------------------------------------------------------------------------------------------


def _stop_signal(cfg: RunConfig) -> StopSignal:
    limit = cfg.cluster.stalled_after_s
    if limit and cfg.generation.is_served:  # whose signs of life are responses
        limit = max(limit, limit_s(cfg.sampling.max_new_tokens))
    folder = control_folder() or Path(cfg.output_dir) / f"{cfg.name}.stalled"
    return StopSignal(StallWatch(limit, folder) if limit else None)


def _prepare(cfg: RunConfig, stop: StopSignal, clock: PhaseClock) -> RunServices:
    """Checks all input, then takes the run's folder, and starts its loggers and its servers."""
    arms = arm_configs(cfg)
    check_arm_names(arms)
    folder = RunFolder(Path(cfg.output_dir) / cfg.name)
    folder.check_free(resolved_yaml(cfg))
    folder.require_unused()
    if not Builder(cfg, folder).holds_no_model:
        workers(stop.is_asked).call(Worker.begin, cfg.parallelism, cfg.seed, cfg.threads)  # connects the ranks
    inputs.check_model(cfg)
    Builder(cfg, folder).check_servers()
    check_settings(cfg.exp_manager)  # NeMo imports Megatron, which the platform has been prepared for by now
    data = inputs.load_checked_data(cfg, folder, arms)
    require_several_steps(arms, len(data.train), cfg.sampling.samples_per_prompt)
    cfg = inputs.with_seq_length(cfg, data)
    builder = Builder(cfg, folder, data)
    for arm, training in arms.items():
        given = builder.given_rollouts(arm)
        if given is not None:
            require_given(given, training, len(data.train), cfg.sampling.samples_per_prompt)
    if folder.is_begun:
        done = [stage for stage in folder.journal() if stage != "files"]
        print(f"resuming the unfinished run in {folder.path} (done: {', '.join(done) or 'nothing'})")
    earlier = folder.open(resolved_yaml(cfg))
    if earlier:
        print(f"the earlier run of this config is kept as {earlier}")
    logged = hyperparameters(OmegaConf.to_container(OmegaConf.structured(cfg)), arms)
    tracker = start_tracking(cfg.exp_manager, folder.logs, folder.path / TRACKED, logged)
    _write_files(cfg, folder, data)
    if data.skipped_rows:
        print(f"{data.skipped_rows} bad rows of the problems files were left out")
    if cfg.algorithm != NONE and data.overlap:
        print(f"{len(data.overlap)} of the {len(data.test)} test problems are train problems, too (data.allow_overlap)")
    stops = data.stop.lines() if cfg.model.path is not None else ()
    for line in (*stops, *data.warnings):
        print(printable(line))
    console = RunConsole({WARMUP: cfg.sft.steps, **{name: training.iterations for name, training in arms.items()}})
    log = MetricsLog(folder.path / METRICS, log_numbers(tracker), watch=console, pending=clock.pending)
    if WARMUP not in folder.journal() and not builder.holds_no_model:
        builder.begin_comparison()  # transformers takes the time that servers take to start
    if any(name not in folder.journal() for name in (WARMUP, *arms)):
        builder.start_servers()
    return RunServices(folder, cfg, arms, data, builder, log, stop, console, clock, tracker)


def _write_files(cfg: RunConfig, folder: RunFolder, data: inputs.Data) -> None:
    """The files that the run makes, again where one of them has changed: a resumed run needs what it began with. Notes
    them, and what the run is made from."""

    def checksums() -> dict[str, str]:
        paths = [path for part in (folder.data, folder.base) for path in sorted(part.rglob("*")) if path.is_file()]
        return {str(path.relative_to(folder.path)): checksum(path) for path in paths}

    noted = folder.journal().get("files")
    asked = {"begun": data.begun.isoformat(), "inputs": data.made_from.notes()}
    if noted is None or noted.get("checksums", checksums()) != checksums():
        for path in (*folder.data.glob("*"), *folder.base.glob("*")):
            if path.is_dir():  # all of them are files
                shutil.rmtree(path)
        inputs.write_builtin_files(cfg, folder, data.made)
        asked |= {"checksums": checksums()}
    folder.note_inputs(data.made_from.changed, **asked)


def _conclude(folder: RunFolder) -> None:
    """The table and the first conclusions on the terminal, and the report, which has all of them."""
    from nemo_edo.report.conclusions import terminal_table
    from nemo_edo.report.page import write_report
    from nemo_edo.report.run_set import one_run

    report = write_report(one_run(folder.path))
    print(printable(f"\n{terminal_table(report.comparison)}\n"))
    for sentence in report.conclusions[:SENTENCES]:
        print(textwrap.fill(printable(sentence), 80, initial_indent="- ", subsequent_indent="  "))
    print(f"\nreport: {report.path}")
