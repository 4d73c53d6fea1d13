"""The runs of one report: read back with errors that name the file and the line or key, which there are, that they can
be compared, and which of their arms are the same.

One run is a set of size one. In several, an arm is what is trained: its label and every setting of its algorithm and
its sampling; runs of other seeds repeat it. Everything else, the data, the model, the warm-up and the evaluation, has
to be the same, so that a difference in the results is a difference between arms.
"""

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pandas as pd

from nemo_edo.config.run import REPLICATE
from nemo_edo.errors import DamagedFile, UserError
from nemo_edo.evaluation.results import START, Evaluation, check_arm_names, load_evaluation, require_same_problems
from nemo_edo.report.run_folders import FoundRuns
from nemo_edo.run_folder import CONFIG, METRICS, SAMPLES, SKIPPING, SUMMARY, RunFolder
from nemo_edo.utils.files import flattened, read_json, read_mapping, read_object, read_text

OF_THE_ARM = ("grpo", "idpo", "algorithm", "arms")
SAMPLING_OF_THE_ARM = ("samples_per_prompt", "temperature", "top_p")
WITHOUT_EFFECT = (
    *("micro_batch_size", "micro_batch_tokens", "packing", "share_prompts", "reference_placement", "allow_one_step"),
)
"""Settings of an arm that change memory and speed, never the result."""
MAY_DIFFER = (
    *("name", "experiment", "output_dir", "replicate_baseline", "seed", "train.seed", "threads", "parallelism"),
    *("generation", "exp_manager", "checkpoint", "profile", "cluster", "search", "allow_changed", "data.allow_overlap"),
    *("model.verify", "rewards.function_time_limit_s"),
    *("evaluation.every", "evaluation.bootstrap", "sft.micro_batch_size", "sft.micro_batch_tokens"),
    *("sft.packing", "sft.share_prompts", "model.attention", "model.loss_head", "model.seq_length"),
    # Guards that warn or end a run. Which steps are skipped is part of how an arm was trained.
    *(f"guards.{name}" for name in ("kl", "entropy", "truncated", "reward", "max_skipped_steps")),
    *("guards.sampler_gap", "guards.stale_gap"),
    *(f"sampling.{name}" for name in SAMPLING_OF_THE_ARM),
    *OF_THE_ARM,
)
"""Settings in which runs of one report may differ, sections or single keys."""

REQUIRED_KEYS = {
    "sft_step": ("arm", "step"),
    "train_step": ("arm", "iteration", "step"),
    "collection": ("arm", "iteration"),
    "evaluation": ("arm", "iteration", "metrics"),
    "phases": ("arm", "time"),
}
"""Required keys by kind of line in metrics.jsonl; the report ignores lines of other kinds."""
NUMERIC_KEYS = (
    *("step", "iteration", "loss", "reward", "accuracy", "entropy", "kl", "distinct_4", "well_formed", "exploration"),
    "floor_fraction",
)

START_LABEL = "Start (before RL)"
ALONE_LABEL = "SFT"
"""The label of the same policy in a run without arms, which trains nothing but the warm-up."""
UNTRAINED_LABEL = "Model as it is"
SEARCH_EVALUATION = "evaluation.json"
"""The file in a search's folder with the accuracy of each problem."""
SEARCH_ACCURACY = "search_accuracy"


@dataclass(frozen=True)
class ArmSettings:
    """What sets an arm apart, as the run's summary records it."""

    label: str
    alpha: float | None
    exploration_weight: float
    """alpha * beta, or the coefficient that replaces it."""
    iterations: int


_OF_SUMMARY = {"name": str, "seed": int, "versions": dict, "arms": dict, "baseline": str | None, "time": dict}
_OF_ARM = {name: kind if kind is str else kind | int for name, kind in get_type_hints(ArmSettings).items()}


@dataclass(frozen=True, eq=False)
class RunRecord:
    folder: Path
    config: dict[str, Any]
    config_text: str
    summary: dict[str, Any]
    arms: dict[str, ArmSettings]
    lines: pd.DataFrame
    """metrics.jsonl, a row for each line of the kinds of ``REQUIRED_KEYS``, in order; NaN where a line lacks a key."""
    evaluations: dict[str, Evaluation]
    replicate: Evaluation | None
    """The evaluation of the baseline, trained again with other samples (``replicate_baseline``). It is not an arm."""
    test_time: dict[str, Evaluation]
    """The curves of ``test_time/ARM.json`` (``nemo-edo evaluate --stored``) by evaluated policy, and its
    ``search_accuracy`` where ``search/ARM`` has exactly one search (``nemo-edo search``)."""
    samples: list[dict[str, Any]]
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)
    """Setting -> file -> checksum, of the files that the run began with."""
    changed: list[str] = field(default_factory=list)
    """Inputs that had changed when the run resumed or was evaluated again, in sentences."""

    @property
    def seed(self) -> int:
        return self.summary["seed"]

    @property
    def warm_up_seed(self) -> int:
        """Runs that differ in ``train.seed`` alone share a warm-up."""
        return self.config.get("seed", self.seed)

    def label(self, arm: str) -> str:
        if arm != START:
            return self.arms[arm].label
        if self.arms:
            return START_LABEL
        return UNTRAINED_LABEL if self.config.get("algorithm") == "none" else ALONE_LABEL


def read_run(folder: Path) -> RunRecord:
    """Reads every file of the run folder. Raises UserError naming the file and the line or key that is wrong."""
    run, path = RunFolder(folder), folder / SUMMARY
    summary = read_object(path, _OF_SUMMARY)
    _typed(path, summary, _OF_SUMMARY)
    _typed(path, summary["time"], {"total_s": float | int}, "time.")
    check_arm_names(summary["arms"])
    arms = {
        arm: ArmSettings(**_typed(path, settings, _OF_ARM, f"arms.{arm}.")) for arm, settings in summary["arms"].items()
    }
    evaluations = run.evaluations([START]) | {arm: load_evaluation(run.evaluation(arm)) for arm in arms}
    replicate = None
    if list(arms) != [REPLICATE]:  # a study trains it by itself: then it is an arm like others
        arms.pop(REPLICATE, None)
        replicate = evaluations.pop(REPLICATE, None)
    samples, needed = read_json(folder / SAMPLES), {"question", "answer"}
    if not isinstance(samples, list) or not all(isinstance(one, dict) and needed <= one.keys() for one in samples):
        raise DamagedFile(f"{folder / SAMPLES}: expected problems, each with question and answer")
    parsed = run.lines(REQUIRED_KEYS)
    try:
        lines = lines_table([line for line in parsed if line.get("kind") in REQUIRED_KEYS])
    except (ValueError, TypeError) as error:
        raise DamagedFile(f"{folder / METRICS}: {error}") from error
    from nemo_edo.config.compose import default_values  # loads Hydra

    config, files = read_mapping(folder / CONFIG), run.journal().get("files", {})
    _typed(folder / CONFIG, config, {"data": dict, "model": dict, "evaluation": dict})
    noted = {name: {file: note[0] for file, note in of.items()} for name, of in files.get("inputs", {}).items()}
    if "data.source" in noted:  # the problems that it made
        made = files.get("checksums", {}).items()
        noted["data.source"] = {name: content for name, content in made if name.startswith("data/")}
    return RunRecord(
        folder=folder,
        # An earlier version's lacks the settings that were added since: their defaults are what it did.
        config=_completed(default_values(config.get("job")), config),
        config_text=read_text(folder / CONFIG),
        summary=summary,
        arms=arms,
        lines=lines,
        evaluations=evaluations,
        replicate=replicate,
        test_time={arm: found for arm in evaluations if (found := _read_test_time(run, arm, evaluations[arm]))},
        samples=samples,
        inputs=noted,
        changed=[str(sentence) for sentence in files.get("changed", [])],
    )


def _completed(defaults: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    deeper = {
        key: _completed(defaults[key], value)
        for key, value in config.items()
        if isinstance(value, dict) and isinstance(defaults.get(key), dict)
    }
    return {**defaults, **config, **deeper}


def _typed(path: Path, values: Any, kinds: dict[str, Any], of: str = "") -> dict[str, Any]:
    """The values of these names. Raises DamagedFile for one that is missing, or of another type."""
    for name, kind in kinds.items():
        if not isinstance(values, dict) or not isinstance(values.get(name), kind):
            raise DamagedFile(f"{path}: {of}{name} is missing, or not of the type {getattr(kind, '__name__', kind)}")
    return {name: values[name] for name in kinds}


def setting(record: RunRecord, key: str) -> Any:
    """A dotted key of the resolved config, which holds them all. Raises UserError if it is missing."""
    value: Any = record.config
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"{record.folder / CONFIG}: {key} is missing; expected the run's resolved config")
        value = value[part]
    return value


def _read_test_time(run: RunFolder, arm: str, last: Evaluation) -> Evaluation | None:
    """last: the arm's evaluation. A search from before it may be of other problems, and is left out."""
    path, searches = run.test_time(arm), sorted(run.searches(arm).glob(f"*/{SEARCH_EVALUATION}"))
    evaluations = []
    for one in [*([path] if path.is_file() else []), *(searches if len(searches) == 1 else [])]:
        evaluation = load_evaluation(one)
        if evaluation.problems == last.problems:
            evaluations.append(evaluation)
        else:
            said = f"{one}: has other problems than {run.evaluation(arm)}, or another order, and is left out"
            warnings.warn(said, stacklevel=2)
    if not evaluations:
        return None
    metrics = {name: value for evaluation in evaluations for name, value in evaluation.metrics.items()}
    return replace(evaluations[0], metrics=metrics)


def lines_table(lines: list[dict[str, Any]]) -> pd.DataFrame:
    """``RunRecord.lines`` of the parsed lines. Raises ValueError where a number is something else."""
    frame = pd.DataFrame(lines)
    columns = dict.fromkeys(("kind", "arm", *NUMERIC_KEYS, "metrics", "final", "time", *frame.columns))
    frame = frame.reindex(columns=list(columns))
    frame[[*NUMERIC_KEYS]] = frame[[*NUMERIC_KEYS]].astype(float).replace([np.inf, -np.inf], np.nan)
    # Earlier versions did not log it; most rewards are 0 or 1.
    frame["accuracy"] = frame["accuracy"].fillna(frame["reward"])
    return frame


@dataclass(frozen=True)
class Trained:
    """A policy in one run: an arm, the start or the baseline's replicate."""

    record: RunRecord
    name: str

    @property
    def settings(self) -> ArmSettings:
        return self.record.arms[self.name]

    @property
    def evaluation(self) -> Evaluation:
        replicate = self.record.replicate
        return replicate if self.name == REPLICATE and replicate else self.record.evaluations[self.name]

    @property
    def test_time(self) -> Evaluation | None:
        return self.record.test_time.get(self.name)

    def lines(self, kind: str) -> pd.DataFrame:
        lines = self.record.lines
        return lines[(lines["kind"] == kind) & (lines["arm"] == self.name)]


@dataclass(frozen=True)
class RunSet:
    """Finished runs that can be compared, or one run."""

    records: tuple[RunRecord, ...]
    arms: dict[str, dict[int, Trained]]
    """arm -> seed -> the arm in the run of that seed, in the order in which the runs have them. Its key is its name in
    one run; in several, which may name it differently, its label."""
    labels: dict[str, str]
    left_out: dict[Path, str]
    folder: Path

    @property
    def is_one(self) -> bool:
        """Whether there is one run, so that chance enters by the choice of test problems only."""
        return len(self.records) == 1

    @property
    def seeds(self) -> list[int]:
        return sorted({record.seed for record in self.records})

    @property
    def policies(self) -> dict[str, dict[int, Trained]]:
        """Everything that was evaluated, by seed: the start, the arms and the replicate."""
        starts = {record.seed: Trained(record, START) for record in self.records if START in record.evaluations}
        found = {START: starts, **self.arms} | ({REPLICATE: self.replicates} if self.replicates else {})
        return {name: by_seed for name, by_seed in found.items() if by_seed}

    @property
    def replicates(self) -> dict[int, Trained]:
        """The baseline's second training, by seed, where a run has one."""
        return {record.seed: Trained(record, REPLICATE) for record in self.records if record.replicate is not None}


def read_runs(found: FoundRuns) -> RunSet:
    """Reads the finished runs. Raises UserError where two cannot be compared: the settings that differ, other
    test problems, or one arm trained twice with one seed."""
    records = tuple(read_run(folder) for folder in found.folders)
    theirs = flattened(records[0].config)
    for record in records[1:]:
        ours = flattened(record.config)
        skips = "skip" in (theirs.get(SKIPPING[0]), ours.get(SKIPPING[0]))
        may_differ = MAY_DIFFER if skips else (*MAY_DIFFER, *SKIPPING)
        differing = [
            key
            for key in dict.fromkeys([*theirs, *ours])
            if theirs.get(key) != ours.get(key) and not any(f"{key}.".startswith(f"{free}.") for free in may_differ)
        ]
        if differing:
            key, *more = differing
            one, another = (repr(values[key]) if key in values else "missing" for values in (theirs, ours))
            also = f" (also different: {', '.join(more)})" if more else ""
            raise UserError(
                f"{records[0].folder} and {record.folder} cannot be compared: {key} is {one} in the one and {another} "
                f"in the other{also}; runs of one report may differ in their arms and seeds only"
            )
    _require_same_inputs(records)
    evaluations = {f"{one.folder}: {arm}": result for one in records for arm, result in one.evaluations.items()}
    evaluations |= {f"{one.folder}: {REPLICATE}": one.replicate for one in records if one.replicate}
    require_same_problems(evaluations)
    if len(records) == 1:
        arms = {name: {records[0].seed: Trained(records[0], name)} for name in records[0].arms}
        plain = {name: records[0].label(name) for name in arms}
        several = {label for label, number in Counter(plain.values()).items() if number > 1}
        labels = {name: f"{label} ({name})" if label in several else label for name, label in plain.items()}
    else:
        arms = _grouped(records)
        labels = {label: label for label in arms}
    return RunSet(records, arms, labels, found.left_out, found.common)


def _require_same_inputs(records: Sequence[RunRecord]) -> None:
    """Raises UserError for runs of other data or another model; warns of a user's functions that were edited between,
    as a comment would do, too."""
    seen: dict[str, RunRecord] = {}
    for record in records:
        for key, files in record.inputs.items():
            first = seen.setdefault(key, record)
            if first.inputs[key] == files:
                continue
            said = f"{first.folder} and {record.folder}"
            if key == "model.path" or key.startswith("data."):
                raise UserError(f"{said} cannot be compared: the files of {key} had other content")
            if key.startswith(("rewards.", "arms.", "grpo.")):
                what = "the files had other content, with which the same number may mean something else"
                warnings.warn(f"{said}: {key}: {what}", stacklevel=2)


def one_run(folder: Path) -> RunSet:
    return read_runs(FoundRuns((folder,), {}, folder))


def arm_settings(record: RunRecord, name: str) -> dict[str, Any]:
    """Every setting of a run's arm that can change its result, by dotted key, however they were written."""
    config, differences = record.config, (record.config.get("arms") or {}).get(name, {})
    algorithm = differences.get("algorithm", config.get("algorithm", "grpo"))
    settings = flattened(config.get(algorithm) or {}) | flattened(differences)
    settings |= {f"sampling.{key}": (config.get("sampling") or {}).get(key) for key in SAMPLING_OF_THE_ARM}
    known = record.arms[name]  # with alpha's default, and the coefficient whichever way it was given
    settings |= {"algorithm": algorithm, "alpha": known.alpha, "exploration_coefficient": known.exploration_weight}
    return {key: value for key, value in settings.items() if key not in WITHOUT_EFFECT}


def _grouped(records: Sequence[RunRecord]) -> dict[str, dict[int, Trained]]:
    """The arms by label. Where several arms have the same one, the settings that tell them apart are added to it."""
    groups: dict[tuple, list[Trained]] = {}
    for record in records:
        for name, known in record.arms.items():
            settings = json.dumps(sorted(arm_settings(record, name).items()), default=str)
            alike = json.dumps(json.loads(settings, parse_int=float))  # 0 and 0.0 are one setting
            groups.setdefault((known.label, alike), []).append(Trained(record, name))
    arms: dict[str, dict[int, Trained]] = {}
    for (plain, _), found in groups.items():
        own, *others = (
            arm_settings(first.record, first.name)
            for first in (found[0], *(more[0] for (label, _), more in groups.items() if label == plain))
        )
        apart = [key for key in own if any(other.get(key) != own[key] for other in others)]
        label = ", ".join([plain, *(f"{key} {own[key]}" for key in apart)])
        arms[label] = {}
        for trained in found:
            first = arms[label].setdefault(trained.record.seed, trained)
            if first is not trained:
                raise UserError(
                    f"{first.record.folder} and {trained.record.folder} both trained {label} with seed "
                    f"{first.record.seed}: a seed counts once, so name one of them only"
                )
    return arms
