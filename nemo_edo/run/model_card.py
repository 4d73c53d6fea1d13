"""The README.md of an exported policy, as the Hugging Face hub reads it, and the upload to a hub's repository."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml
from huggingface_hub import HfApi, ModelCardData, metadata_load
from huggingface_hub.errors import HFValidationError

from nemo_edo import __version__
from nemo_edo.config import ArmConfig, IDPOConfig
from nemo_edo.config.run import arm_label
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import BEST, START, Evaluation, largest, load_evaluation, metric_name
from nemo_edo.run_folder import RunFolder

REPORT = "report.html"
LICENCE = ("license", "license_name", "license_link")
"""The fields of a card that say under which licence a model is."""
USE = """
## Use

```python
from transformers import AutoTokenizer
from {module} import {name}

model = {name}.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```"""
PAPER = """
## Citation

The exploration term is that of "Exploration-Driven Optimization for Test-Time Large Language Model Reasoning" (Changhao
Li, Yuchen Zhuang, Chenxiao Gao, Haotian Sun, Rushi Qiang, Chao Zhang, Bo Dai; 2026)."""
HUB_ERRORS = (httpx.HTTPError, OSError, HFValidationError)
"""What huggingface_hub raises for a network, a missing token, a refusal, and a name that cannot be one."""


@dataclass(frozen=True)
class Exported:
    """What a card says of a policy."""

    name: str
    """The folder's."""
    run: RunFolder
    policy: str
    """ARM, or ARM.best and so on."""
    training: ArmConfig | None
    """The arm's settings; None: the policy that the arms start from."""
    sft_steps: int
    data: str
    seed: int
    bootstrap: int
    """Resamples of the problems for intervals."""
    base: Path
    """The folder of the model that was trained."""
    hub_name: str | None
    """That model's name on the hub, where it was loaded from there."""
    adapter: bool

    @property
    def method(self) -> str:
        if self.training is None:
            return "supervised fine-tuning"
        kind = "iDPO" if isinstance(self.training, IDPOConfig) else "GRPO"
        return f"ED-{kind}" if self.training.exploration_weight else kind


def arm_of(policy: str) -> str:
    """The arm that a policy's name belongs to: ``ARM``, ``ARM.best``, ``ARM.best_iter_00003``."""
    return policy.partition(BEST)[0]


def write_card(exported: Exported, out: Path) -> None:
    """Writes ``out/README.md``, with the run's report beside it."""
    try:
        fields = metadata_load(exported.base / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):  # the base has no card, or none that can be read
        fields = {}
    licence = {field: fields[field] for field in LICENCE if field in fields}
    header = ModelCardData(
        base_model=exported.hub_name,
        library_name="peft" if exported.adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["nemo-edo", exported.method.lower().replace(" ", "-")],
        **licence,
    )
    report = exported.run.path / REPORT
    if report.is_file():
        shutil.copyfile(report, out / REPORT)
    lines = [f"---\n{header.to_yaml()}\n---\n", *_training(exported, licence.get("license"), report.is_file())]
    if exported.run.evaluation(exported.policy).is_file():
        lines += _results(exported)
    module, name = "transformers", "AutoModelForCausalLM"
    if exported.adapter:
        module, name = "peft", "AutoPeftModelForCausalLM"
    lines.append(USE.format(module=module, name=name, folder=exported.name))
    if exported.method.startswith("ED-"):
        lines.append(PAPER)
    (out / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _training(exported: Exported, licence: str | None, has_report: bool) -> Iterator[str]:
    base, training = exported.hub_name or exported.base.resolve().name, exported.training
    yield f"# {exported.run.path.name}: {exported.policy}\n"
    yield f"{base} after {exported.method}, by nemo-edo {__version__}.\n"
    yield "## Training\n"
    yield f"- Base model: {base}; its licence: {licence or 'not stated in its folder'}"
    if exported.sft_steps:
        yield f"- Warm-up: {exported.sft_steps} steps of supervised fine-tuning"
    if training is not None:
        yield f"- Arm: {arm_label(training)}; {training.iterations} iterations, learning rate {training.optimizer.lr:g}"
        yield f"- KL to the reference (beta): {training.beta:g}"
        yield f"- Coefficient of the exploration term (alpha * beta): {training.exploration_weight:g}"
        if training.log_ratio_floor is not None:
            yield f"- Floor under its log-ratios: {training.log_ratio_floor:g}"
    yield f"- Data: {exported.data}; seed {exported.seed}"
    if has_report:
        yield f"- [Report of the run]({REPORT})"


def _results(exported: Exported) -> Iterator[str]:
    """The policy's metrics with 95 % intervals over problems, beside those of the policy that the arms start from."""
    own, start = load_evaluation(exported.run.evaluation(exported.policy)), exported.run.evaluation(START)
    compared: dict[str, Evaluation] = {"this model": own}
    if exported.training is not None and start.is_file():
        compared = {"before": load_evaluation(start), **compared}
    found = {name: one.intervals(resamples=exported.bootstrap, seed=exported.seed) for name, one in compared.items()}
    several = [largest(list(own.metrics), family) for family in ("vote@", "pass@")]
    shown = ["greedy_accuracy", "accuracy", *filter(None, several), "distinct_4", "entropy"]
    yield "\n## Results\n"
    yield f"{len(own.problems)} test problems, temperature {own.temperature:g}; 95 % intervals over problems.\n"
    yield f"| metric | {' | '.join(found)} |\n|---{'|---' * len(found)}|"
    for metric in shown:
        if all(metric in intervals for intervals in found.values()):
            values = (intervals[metric] for intervals in found.values())
            cells = [f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]" for value in values]
            yield f"| {metric_name(metric)} | {' | '.join(cells)} |"


class HubRepository:
    """A model repository of the hub; made before the export, so that a missing token costs no time."""

    def __init__(self, name: str) -> None:
        """Raises UserError where the hub cannot be reached, or refuses the name or the token."""
        self._api = HfApi()
        try:
            self.name = self._api.create_repo(name, exist_ok=True).repo_id
        except HUB_ERRORS as error:
            raise UserError(f"--push-to-hub {name}: {error}; `hf auth login` or HF_TOKEN logs in") from error

    def upload(self, folder: Path) -> str:
        """The address of the repository. Raises UserError where the upload fails; the folder stays."""
        try:
            self._api.upload_folder(repo_id=self.name, folder_path=folder, commit_message="Upload by nemo-edo export")
        except HUB_ERRORS as error:
            raise UserError(f"--push-to-hub {self.name}: {error}; the model is in {folder}") from error
        return f"{self._api.endpoint}/{self.name}"
