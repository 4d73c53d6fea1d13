"""A run's folder, opened again: its config, its questions, and the responses of its training and its evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_edo.config import RunConfig
from nemo_edo.config.compose import arm_configs, compose_run, final_iteration
from nemo_edo.data.problems import load_problems
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import START, check_arm_names
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run.made_from import require_noted
from nemo_edo.run_folder import CONFIG, RunFolder
from nemo_edo.types import ScoredRollout
from nemo_edo.utils.files import flattened, read_mapping


@dataclass(frozen=True)
class StoredRun:
    folder: RunFolder
    cfg: RunConfig

    @property
    def best_policies(self) -> list[str]:
        """ARM.best, ARM.best_iter_00003 and so on, which were kept by ``checkpoint.best``."""
        return [path.name for arm in arm_configs(self.cfg) for path in self.folder.best_checkpoints(arm)]

    @property
    def policies(self) -> list[str]:
        """The start of the arms, and the arms."""
        return [START, *arm_configs(self.cfg)]

    def questions(self, split: str) -> dict[str, str]:
        """The questions of the run's "train" or "test" problems by id; none where it has no such file."""
        data, own = self.cfg.data, self.folder.data / f"{split}.jsonl"
        path = getattr(data, split) or (str(own) if own.is_file() else None)
        if path is None:
            return {}
        require_noted(f"data.{split}", Path(path), self.folder.journal().get("files", {}).get("inputs", {}))
        return {problem.id: problem.question for problem in load_problems(path, data, split).problems}

    def evaluated(self, policies: Sequence[str]) -> list[str]:
        """The given policies, or all if none are given, whose final evaluation has kept its responses. Raises
        UserError for an unknown one, for one that has none, and where there is none at all."""
        there = [name for name in policies or self.policies if self.folder.evaluation(name).is_file()]
        return self._chosen(policies, there, "has not been evaluated yet", "no arm has been evaluated yet")

    def evaluation_responses(self, policy: str, kind: str) -> list[ScoredRollout]:
        """The "greedy" or "sampled" responses of the policy's final evaluation, sorted by problem and sample."""
        return RolloutStore(self.folder.evaluated(policy, kind)).read(final_iteration(self.cfg, policy))

    def training_responses(self, arms: Sequence[str]) -> list[ScoredRollout]:
        """Responses of all complete iterations of the given arms, or of all if none are given; errors as for
        ``evaluated``."""
        iterations = {}
        for arm in arm_configs(self.cfg):
            found = self.folder.rollouts(arm).glob("iter_?????/rank_*.parquet")
            if numbers := {int(path.parent.name.removeprefix("iter_")) for path in found}:
                iterations[arm] = sorted(numbers)
        none = "no arm has stored responses; train it, or run nemo-edo collect"
        chosen = self._chosen(arms, list(iterations), "has no stored responses", none)
        stores = {arm: RolloutStore(self.folder.rollouts(arm)) for arm in chosen}
        return [response for arm in chosen for t in iterations[arm] for response in stores[arm].read(t)]

    def _chosen(self, names: Sequence[str], there: Sequence[str], lacks: str, none: str) -> list[str]:
        """The names, or what is there if none are given."""
        if strange := sorted({*names} - {*self.policies, *self.best_policies}):
            raise UserError(f"{self.folder.path} has no arm {strange[0]!r}; it has {', '.join(self.policies)}")
        if missing := sorted(set(names) - set(there)):
            raise UserError(f"{self.folder.path}: arm {', '.join(missing)} {lacks}")
        if not there:
            raise UserError(f"{self.folder.path}: {none}")
        return list(names or there)


def open_run(run: Path, overrides: Sequence[str] = (), *, only: Sequence[str] = ("",), command: str = "") -> StoredRun:
    """The run with ``overrides`` of its config. Raises UserError for a folder that is not a run's, and for overrides
    of the command that do not begin with one of ``only``."""
    if strange := [override for override in overrides if not override.lstrip("+").startswith(tuple(only))]:
        takes = " and ".join(f"{one}*" if one.endswith(".") else one.rstrip("=") for one in only)
        raise UserError(f"{command} takes overrides of {takes} only, not {', '.join(strange)}")
    if not (run / CONFIG).is_file():
        raise UserError(f"{run} is not the folder of a run: it has no config.yaml")
    for key, value in flattened(read_mapping(run / CONFIG)).items():
        if "${" in str(value):  # a run's own are resolved; another's could ask for a variable of this environment
            raise UserError(f"{run / CONFIG}: {key} is {value!r}: a run's config has no interpolations")
    cfg = compose_run("config", list(overrides), config_dir=run)
    check_arm_names(arm_configs(cfg))
    return StoredRun(RunFolder(run), cfg)
