"""The README.md of an exported policy, as the Hugging Face hub reads it, and the upload to a hub's repository."""

import shutil
from pathlib import Path

import httpx
import yaml
from huggingface_hub import HfApi, ModelCardData, metadata_load
from huggingface_hub.errors import HFValidationError
from jinja2 import Template

from nemo_edo import __version__
from nemo_edo.config import IDPOConfig
from nemo_edo.config.compose import arm_configs
from nemo_edo.config.run import arm_label
from nemo_edo.data.model_folder import is_hub_name
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import BEST, START, largest, metric_name
from nemo_edo.run.inputs import model_folder
from nemo_edo.run.stored_run import StoredRun

REPORT = "report.html"
LICENCE = ("license", "license_name", "license_link")
"""The fields of a card that say under which licence a model is."""
TEMPLATE = Path(__file__).parent / "templates" / "card.md.j2"
HUB_ERRORS = (httpx.HTTPError, OSError, HFValidationError)
"""What huggingface_hub raises for a network, a missing token, a refusal, and a name that cannot be one."""


def write_card(out: Path, opened: StoredRun, policy: str, *, name: str, adapter: bool) -> None:
    """Writes ``out/README.md``, with the run's report beside it.

    policy: ARM, or ARM.best and so on, or the one that the arms start from. name: of the exported folder.
    """
    run, cfg, method = opened.folder, opened.cfg, "supervised fine-tuning"
    training = arm_configs(cfg).get(policy.partition(BEST)[0])
    base, path = model_folder(cfg.model, run), cfg.model.path
    hub_name = path if path is not None and is_hub_name(path) else None
    if training is not None:
        kind = "iDPO" if isinstance(training, IDPOConfig) else "GRPO"
        method = f"ED-{kind}" if training.exploration_weight else kind
    try:
        fields = metadata_load(base / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):  # the base has no card, or none that can be read
        fields = {}
    licence = {field: fields[field] for field in LICENCE if field in fields}
    header = ModelCardData(
        base_model=hub_name,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["nemo-edo", method.lower().replace(" ", "-")],
        **licence,
    )
    if (run.path / REPORT).is_file():
        shutil.copyfile(run.path / REPORT, out / REPORT)
    policies = {"before": START, "this model": policy} if training is not None else {"this model": policy}
    evaluated = run.evaluations(policies.values())
    own = evaluated.get(policy)
    results = {}
    for column, one in policies.items() if own else ():
        if one in evaluated:
            intervals = evaluated[one].intervals(resamples=cfg.evaluation.bootstrap, seed=cfg.seed)
            results[column] = {metric: (found.mean, found.low, found.high) for metric, found in intervals.items()}
    several = [largest(list(own.metrics), family) for family in ("vote@", "pass@")] if own else []
    metrics = ["greedy_accuracy", "accuracy", *filter(None, several), "distinct_4", "entropy"]
    shown = [metric for metric in metrics if all(metric in intervals for intervals in results.values())]
    text = Template(TEMPLATE.read_text(encoding="utf-8"), trim_blocks=True, lstrip_blocks=True).render(
        name=name,
        run=run,
        policy=policy,
        training=training,
        sft_steps=cfg.sft.steps,
        data=cfg.data.source or cfg.data.train or "the built-in task",
        seed=cfg.seed,
        header=header.to_yaml(),
        method=method,
        version=__version__,
        base_name=hub_name or base.resolve().name,
        licence=licence.get("license"),
        label=arm_label(training) if training is not None else "",
        report=REPORT if (out / REPORT).is_file() else "",
        own=own,
        results=results,
        shown={metric: metric_name(metric) for metric in shown},
        module="peft" if adapter else "transformers",
        model_class="AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM",
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
