"""The README.md of an exported policy, as the Hugging Face hub reads it, and the upload to a hub's repository."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml
from huggingface_hub import HfApi, ModelCardData, metadata_load
from huggingface_hub.errors import HFValidationError
from jinja2 import Template

from nemo_edo import __version__
from nemo_edo.config import ArmConfig, IDPOConfig
from nemo_edo.config.run import arm_label
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import BEST, START, Evaluation, largest, load_evaluation, metric_name
from nemo_edo.run_folder import RunFolder

REPORT = "report.html"
LICENCE = ("license", "license_name", "license_link")
"""The fields of a card that say under which licence a model is."""
TEMPLATE = Path(__file__).parent / "templates" / "card.md.j2"
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
    run, report = exported.run, exported.run.path / REPORT
    if report.is_file():
        shutil.copyfile(report, out / REPORT)
    training, path, start = exported.training, run.evaluation(exported.policy), run.evaluation(START)
    compared: dict[str, Evaluation] = {}
    if path.is_file():
        before = {"before": load_evaluation(start)} if training is not None and start.is_file() else {}
        compared = {**before, "this model": load_evaluation(path)}
    results = {
        name: {metric: (interval.mean, interval.low, interval.high) for metric, interval in intervals.items()}
        for name, one in compared.items()
        for intervals in [one.intervals(resamples=exported.bootstrap, seed=exported.seed)]
    }
    own = compared.get("this model")
    several = [largest(list(own.metrics), family) for family in ("vote@", "pass@")] if own else []
    metrics = ["greedy_accuracy", "accuracy", *filter(None, several), "distinct_4", "entropy"]
    shown = [metric for metric in metrics if all(metric in intervals for intervals in results.values())]
    text = Template(TEMPLATE.read_text(encoding="utf-8"), trim_blocks=True, lstrip_blocks=True).render(
        **vars(exported),
        header=header.to_yaml(),
        method=exported.method,
        version=__version__,
        base_name=exported.hub_name or exported.base.resolve().name,
        licence=licence.get("license"),
        label=arm_label(training) if training is not None else "",
        report=REPORT if report.is_file() else "",
        own=own,
        results=results,
        shown={metric: metric_name(metric) for metric in shown},
        module="peft" if exported.adapter else "transformers",
        model_class="AutoPeftModelForCausalLM" if exported.adapter else "AutoModelForCausalLM",
    )
    (out / "README.md").write_text(text.rstrip() + "\n", encoding="utf-8")


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
