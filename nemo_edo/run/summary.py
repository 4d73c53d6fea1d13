"""A run's summary.json and samples.json, and the warnings that it keeps for them."""

import importlib.metadata
import json
import os
import platform as machine
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import nemo_edo
from nemo_edo import __version__
from nemo_edo.config import IDPOConfig
from nemo_edo.config.compose import final_iteration
from nemo_edo.config.run import REPLICATE, arm_label, baseline_arm, training_seed
from nemo_edo.errors import UserError
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run.policy_evaluation import early_stop
from nemo_edo.run.services import RunServices
from nemo_edo.run.tracking import EXAMPLES, first_responses
from nemo_edo.run_folder import WARNINGS
from nemo_edo.types import Problem, ScoredRollout
from nemo_edo.utils.files import read_object
from nemo_edo.worker.dispatch import workers

PACKAGES = ("torch", "megatron-core", "megatron-bridge", "nemo-toolkit", "transformers")


def write_samples(run: RunServices, stages: Sequence[str]) -> None:
    """samples.json: each test problem with some responses of each policy."""
    shown = {}
    for name in stages:
        try:
            shown[name] = read_object(run.folder.path / "samples" / f"{name}.json", ())
        except UserError:  # the same again from the stored responses
            stored = RolloutStore(run.folder.evaluated(name, "sampled")).read(final_iteration(run.cfg, name))
            first = [one for one in stored if one.rollout.sample_index < run.cfg.evaluation.samples]
            shown[name] = examples(run.data.test, first)
    samples = [
        {
            "question": problem.question,
            "answer": problem.answer,
            "responses": {name: found.get(problem.id, []) for name, found in shown.items()},
        }
        for problem in run.data.test
    ]
    run.folder.write_json("samples.json", samples)


def write_summary(run: RunServices, stages: Sequence[str]) -> None:
    """summary.json: what was run, where, how long it took, and what it warned of."""
    folder, data, journal = run.folder, run.data, run.folder.journal()
    arms: dict[str, dict[str, Any]] = {}
    for name, arm in run.arms.items():
        arms[name] = {
            "label": arm_label(arm) + (", replicate" if name == REPLICATE else ""),
            "algorithm": "idpo" if isinstance(arm, IDPOConfig) else "grpo",
            "alpha": arm.effective_alpha,
            "beta": arm.beta,
            "exploration_weight": arm.exploration_weight,
            "log_ratio_floor": arm.log_ratio_floor,
            "entropy_coefficient": getattr(arm, "entropy_coefficient", 0.0),
            "iterations": arm.iterations,
        }
        if stop := early_stop(run.cfg.early_stop, folder, name):
            arms[name]["stopped_early"] = stop.in_words(arm.iterations)
    devices = f"{len(os.sched_getaffinity(0))} x {machine.machine()} CPU"
    if torch.cuda.is_available():  # of the first process
        devices = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    # What changes the meaning of every arm's results, and then what single arms have warned of.
    said = [text.removeprefix("warning: ") for text in data.warnings]
    if data.skipped_rows:
        said.append(f"{data.skipped_rows} bad rows of the problems files were left out")
    if data.overlap:
        said.append(f"{len(data.overlap)} of the {len(data.test)} test problems are train problems, too")
    packages = {package: importlib.metadata.version(package) for package in PACKAGES}
    summary = {
        "name": folder.path.name,
        "seed": training_seed(run.cfg),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": devices,
        "versions": {"nemo-edo": __version__, "python": machine.python_version(), **packages},
        "processes": workers().size,
        "arms": arms,
        "baseline": baseline_arm(run.arms),
        "skipped_rows": data.skipped_rows,
        "time": {"total_s": round(run.log.elapsed, 1), **{name: journal[name]["seconds"] for name in stages}},
        "kernels": {} if run.builder.holds_no_model else read_object(folder.path / "kernels.json", ()),
        "warnings": [*({"arm": "", "text": text} for text in said), *kept(folder.path)],
    }
    folder.write_json("summary.json", summary)


def _commit() -> str | None:
    """The commit of the package's source, with a + where its files differ from it; None where git does not keep it.

    Other files do not count: a study's table grows by each of its runs.
    """
    if shutil.which("git") is None:
        return None
    git = ["git", "-C", str(Path(__file__).parents[1])]
    kept = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=False)
    if kept.returncode:  # installed, perhaps inside the repository of another project
        return None
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "."], check=False)
    return head.stdout.strip() + "+" * (changed.returncode != 0)


def examples(problems: Sequence[Problem], scored: Sequence[ScoredRollout]) -> dict[str, list[dict[str, Any]]]:
    """An arm's first responses to the first problems, by problem."""
    return {
        problem.id: [{"text": item.rollout.text, "reward": item.reward} for item in first_responses(problem, scored)]
        for problem in problems[:EXAMPLES]
    }


PACKAGE = Path(nemo_edo.__file__).parent


@contextmanager
def kept_warnings(folder: Path, stage: Callable[[], str]) -> Iterator[None]:
    """Inside the block, this package's own warnings are also written to the folder, each once, with the stage that they
    came in."""
    show, known = warnings.showwarning, kept(folder)

    def write_and_show(message, category, filename, lineno, file=None, line=None) -> None:
        show(message, category, filename, lineno, file, line)
        entry = {"arm": stage(), "text": str(message)}
        if Path(filename).is_relative_to(PACKAGE) and entry not in known:
            known.append(entry)
            with (folder / WARNINGS).open("a", encoding="utf-8") as out:
                out.write(json.dumps(entry, ensure_ascii=False) + "\n")

    warnings.showwarning = write_and_show
    try:
        yield
    finally:
        warnings.showwarning = show


def kept(folder: Path) -> list[dict[str, str]]:
    path = folder / WARNINGS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
