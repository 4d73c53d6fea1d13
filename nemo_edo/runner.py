"""The main job: a warm-up, then one training for each arm from the same start, evaluations, and the report."""

from __future__ import annotations

import importlib.metadata
import platform as machine
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_edo import __version__, factory
from nemo_edo.algorithms.iteration import Iteration, run_iterations
from nemo_edo.algorithms.sampling import sampling_requests
from nemo_edo.algorithms.supervised import train_supervised
from nemo_edo.config import GRPOConfig, RunConfig
from nemo_edo.configuration import arm_configs, compose_run, resolved_yaml
from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.errors import UserError
from nemo_edo.evaluation.comparison import START as WARMUP
from nemo_edo.evaluation.conclusions import conclusions, terminal_table
from nemo_edo.evaluation.report import write_report
from nemo_edo.evaluation.run import Evaluator
from nemo_edo.evaluation.run_record import compare_run, read_run
from nemo_edo.megatron import checkpoint, platform
from nemo_edo.megatron.build import device_and_groups, export_hf_folder
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
from nemo_edo.refit.in_process import InProcessSync
from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.run_folder import MetricsLog, RunFolder
from nemo_edo.tracking import check_settings, log_numbers, start_tracking

EXAMPLES, EXAMPLE_RESPONSES = 6, 3
"""Test problems, and responses to each by each arm, that the report shows side by side."""
PACKAGES = ("torch", "megatron-core", "megatron-bridge", "nemo-toolkit", "transformers")


@dataclass(frozen=True)
class Job:
    """What every stage of a run needs."""

    cfg: RunConfig
    arms: dict[str, GRPOConfig]
    folder: RunFolder
    data: factory.Data
    trainer: object
    log: MetricsLog
    is_main: bool


def train(cfg: RunConfig) -> Path:
    """Runs the config and returns the run's folder. Every check of the input comes before any work on a model."""
    started = time.monotonic()
    job = _prepare(cfg)
    seconds = {}
    samples = {WARMUP: _stage(seconds, WARMUP, lambda: _warm_up(job))}
    for arm, settings in job.arms.items():
        samples[arm] = _stage(seconds, arm, lambda arm=arm, settings=settings: _train_arm(job, arm, settings))
    if job.is_main:
        job.folder.write_json("samples.json", _side_by_side(job, samples))
        seconds = {"total_s": round(time.monotonic() - started, 1), **seconds}
        job.folder.write_json("summary.json", _summary(job, seconds))
        _conclude(job.folder)
    torch.distributed.barrier()
    return job.folder.path


def evaluate(run: Path, arm: str | None, overrides: list[str]) -> None:
    """Evaluates a run's trained arms anew (``overrides`` of evaluation.*), and writes its report again."""
    strange = [override for override in overrides if not override.startswith("evaluation.")]
    if strange:
        raise UserError(f"evaluate takes overrides of evaluation.* only, not {', '.join(strange)}")
    folder, cfg = _open(run, overrides)
    trained = arm_configs(cfg)
    names = [arm] if arm else [WARMUP, *trained]
    for name in names:
        _require_arm(name, [WARMUP, *trained], folder)
    platform.init_process_group(platform.enter(cfg.threads))
    data = factory.load_data(cfg, folder)
    log = MetricsLog(folder.path / "metrics.jsonl", log_numbers(None), writes=_is_main())
    job = Job(cfg, trained, folder, data, None, log, _is_main())
    for name in names:
        model = factory.build_model(cfg, folder, trained.get(name, cfg.grpo))
        checkpoint.load(model.policy, folder.checkpoint(name))
        _evaluate(job, model, name, trained[name].iterations if name in trained else 0)
    if job.is_main:
        _conclude(folder)


def export(run: Path, out: Path, arm: str | None) -> None:
    """Writes a trained policy as a Hugging Face folder. ``arm``: needed where the run has several and none of them
    is the config's own ``grpo`` section as it is."""
    folder, cfg = _open(run, [])
    arms = arm_configs(cfg)
    if arm is None:
        own = [name for name in arms if not cfg.arms.get(name)]
        if len(arms) != 1 and len(own) != 1:
            raise UserError(f"{run} has the arms {', '.join(arms)}: choose one with --arm")
        arm = own[0] if own else next(iter(arms))
    _require_arm(arm, [WARMUP, *arms], folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already and is not an empty folder")
    model = factory.build_model(cfg, folder, arms.get(arm, cfg.grpo))
    checkpoint.load(model.policy, folder.checkpoint(arm))
    export_hf_folder(model.built, out)
    if _is_main():
        print(f"the policy of arm {arm} is in {out}")


# --- stages -------------------------------------------------------------------------------------------------------


def _prepare(cfg: RunConfig) -> Job:
    arms = arm_configs(cfg)
    _require_arm_names(arms)
    check_settings(cfg.exp_manager)
    folder = RunFolder(Path(cfg.output_dir) / cfg.name)
    config = resolved_yaml(cfg)
    folder.check_free(config)
    device_and_groups(cfg.parallelism, cfg.seed, cfg.threads)
    factory.check_model(cfg)
    data = factory.load_checked_data(cfg, folder, arms.values())
    is_main = _is_main()
    torch.distributed.barrier()  # every rank has looked at the folder before it changes
    if is_main:
        earlier = folder.create()
        if earlier:
            print(f"the earlier run of this config is kept as {earlier}")
    torch.distributed.barrier()
    trainer = start_tracking(cfg.exp_manager, folder.path)  # first: it moves away the files that it finds
    if is_main:
        folder.write_config(config)
        factory.write_builtin_files(cfg, folder)
    torch.distributed.barrier()
    if is_main and data.skipped_rows:
        print(f"{data.skipped_rows} bad rows of the problems files were left out")
    log = MetricsLog(folder.path / "metrics.jsonl", log_numbers(trainer), writes=is_main)
    return Job(cfg, arms, folder, data, trainer, log, is_main)


def _warm_up(job: Job) -> list:
    cfg = job.cfg
    model = factory.build_model(cfg, job.folder, cfg.sft, job.trainer)
    if cfg.sft.steps:
        model.start_training(cfg.sft.steps)
        train_supervised(
            model,
            job.data.solutions,
            cfg.sft,
            pad_id=job.data.pad_id,
            seed=cfg.seed,
            log=_named(job.log, WARMUP),
            progress=job.is_main,
        )
    checkpoint.save(model.policy, job.folder.checkpoint(WARMUP))
    return _evaluate(job, model, WARMUP, 0)


def _train_arm(job: Job, arm: str, settings: GRPOConfig) -> list:
    cfg, data = job.cfg, job.data
    model = factory.build_model(cfg, job.folder, settings, job.trainer)
    checkpoint.load(model.policy, job.folder.checkpoint(WARMUP))
    model.freeze_reference()
    model.engine = engine = factory.build_engine(cfg, model, data)
    iteration = Iteration(
        policy=model,
        engine=engine,
        weight_sync=InProcessSync(engine),
        scorer=ExactAnswerScorer(),
        store=RolloutStore(job.folder.rollouts(arm)),
        problems=data.train,
        prompts=data.prompts,
        grpo=settings,
        sampling=cfg.sampling,
        pad_id=data.pad_id,
        seed=cfg.seed,
        log=_named(job.log, arm),
        write_rollouts=job.is_main,
        progress=arm if job.is_main else None,
    )
    model.start_training(iteration.total_steps)

    def short_evaluation(t: int) -> None:
        if cfg.evaluation.every and t % cfg.evaluation.every == 0 and t < settings.iterations:
            _evaluate(job, model, arm, t, final=False)

    run_iterations(iteration, short_evaluation)
    checkpoint.save(model.policy, job.folder.checkpoint(arm))
    return _evaluate(job, model, arm, settings.iterations)


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
    intervals = {
        name: evaluation.interval(name, resamples=cfg.evaluation.bootstrap, seed=cfg.seed)
        for name in evaluation.metrics
    }
    metrics = {name: {"mean": i.mean, "low": i.low, "high": i.high} for name, i in intervals.items()}
    job.log("evaluation", arm=arm, iteration=iteration, final=final, metrics=metrics)
    if final and job.is_main:
        job.folder.write_evaluation(evaluation)
    return scored


# --- records ------------------------------------------------------------------------------------------------------


def _conclude(folder: RunFolder) -> None:
    """The table and the conclusions on the terminal, and the report."""
    comparison = compare_run(read_run(folder.path))
    print(f"\n{terminal_table(comparison)}\n")
    for sentence in conclusions(comparison):
        print(f"- {sentence}")
    print(f"\nreport: {write_report(folder.path)}")


def _summary(job: Job, seconds: dict[str, float]) -> dict:
    arms = {
        name: {
            "label": arm_label(settings),
            "alpha": settings.effective_alpha,
            "beta": settings.beta,
            "exploration_weight": settings.exploration_weight,
            "log_ratio_floor": settings.log_ratio_floor,
            "entropy_coefficient": settings.entropy_coefficient,
            "iterations": settings.iterations,
        }
        for name, settings in job.arms.items()
    }
    plain = [n for n, s in job.arms.items() if not s.exploration_weight and not s.entropy_coefficient]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "name": job.cfg.name,
        "seed": job.cfg.seed,
        "versions": {"nemo-edo": __version__, "python": machine.python_version(), **versions},
        "processes": torch.distributed.get_world_size(),
        "arms": arms,
        "baseline": (plain or list(arms))[0],
        "skipped_rows": job.data.skipped_rows,
        "time": seconds,
    }


def arm_label(settings: GRPOConfig) -> str:
    """What an arm is, from its settings: "GRPO", "ED-GRPO α=0.001", "GRPO, entropy bonus 0.03"."""
    parts = ["GRPO"]
    if settings.exploration_weight:
        strength = (
            f"α={settings.effective_alpha:g}"
            if settings.effective_alpha is not None
            else f"αβ={settings.exploration_coefficient:g}"
        )
        parts = [f"ED-GRPO {strength}"]
        if settings.log_ratio_floor is not None:
            parts.append(f"floor {settings.log_ratio_floor:g}")
    if settings.entropy_coefficient:
        parts.append(f"entropy bonus {settings.entropy_coefficient:g}")
    return ", ".join(parts)


def _side_by_side(job: Job, samples: dict[str, list]) -> list[dict]:
    """The first test problems with each arm's first responses."""
    shown = []
    for problem in job.data.test[:EXAMPLES]:
        responses = {
            arm: [
                {"text": item.rollout.text, "reward": item.reward}
                for item in scored
                if item.rollout.problem_id == problem.id
            ][:EXAMPLE_RESPONSES]
            for arm, scored in samples.items()
        }
        shown.append({"question": problem.question, "answer": problem.answer, "responses": responses})
    return shown


# --- small things -------------------------------------------------------------------------------------------------


def _open(run: Path, overrides: list[str]) -> tuple[RunFolder, RunConfig]:
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is not the folder of a run: it has no config.yaml")
    return RunFolder(run), compose_run("config", overrides, config_dir=run)


def _require_arm_names(arms: Iterable[str]) -> None:
    """An arm's name is that of its folders and files."""
    for arm in arms:
        if arm == WARMUP:
            raise UserError(f"arms.{arm}: {WARMUP} is what the start of all arms is called; choose another name")
        if "/" in arm or arm.startswith("."):
            raise UserError(f"arms.{arm}: an arm's name has no / and no . at its beginning")


def _require_arm(arm: str, known: Iterable[str], folder: RunFolder) -> None:
    if arm not in known:
        raise UserError(f"{folder.path} has no arm {arm!r}; it has {', '.join(known)}")
    if not folder.checkpoint(arm).is_dir():
        raise UserError(f"{folder.checkpoint(arm)} is missing: the run did not come to the end of arm {arm}")


def _stage(seconds: dict[str, float], name: str, work):
    start = time.monotonic()
    result = work()
    seconds[name] = round(time.monotonic() - start, 1)
    return result


def _named(log: MetricsLog, arm: str):
    return lambda kind, **values: log(kind, arm=arm, **values)


def _is_main() -> bool:
    return torch.distributed.get_rank() == 0
