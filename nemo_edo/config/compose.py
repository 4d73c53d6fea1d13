"""A run's configuration: what ``config.hydra`` makes of files and a command line's overrides, on ``config``'s types.

Hydra composes without the types, so that files may have differences only and an override may name any key. The types
are checked here, where the source of a value is still known: each error is one line that names the full key, the file
and line or the override that it comes from, and what would be right.
"""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Optional, Union, get_args, get_origin

from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from nemo_edo.config import ALGORITHMS, ArmConfig, RewardModelRunConfig, RunConfig, ScoreConfig
from nemo_edo.config.checks import SettingError, setting_types
from nemo_edo.config.hydra import DEFAULT, ConfigError, compose_values, search_order
from nemo_edo.config.run import REPLICATE, baseline_arm
from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.utils.files import flattened

TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null",
              list: "a list"}  # fmt: skip
NOT_GIVEN = "(not given)"
JOB = "job"  # the key that says which job a config is for, where it is not a run's
JOBS = {None: RunConfig, "reward_model": RewardModelRunConfig, "score": ScoreConfig}
Job = RunConfig | RewardModelRunConfig | ScoreConfig


def compose_run(config_name: str, overrides: list[str], config_dir: str | Path | None = None) -> RunConfig:
    """The checked configuration of a run. ``config_name`` names a file of ``config_dir`` (``None``: the shipped
    ``conf/``) without its ``.yaml``, such as ``experiment/main/gsm8k_llama3_grpo``; ``overrides`` are in Hydra's
    syntax. A config or group that ``config_dir`` lacks comes from the shipped ``conf/``. Raises ``ConfigError``."""
    return require_run(compose_job(config_name, overrides, config_dir), config_name)


def compose_job(config_name: str, overrides: list[str], config_dir: str | Path | None = None) -> Job:
    """Like ``compose_run``, for a config that may be another job's: its key ``job`` says which."""
    return _composed(config_name, overrides, config_dir, complete=True)[0]


def compose_incomplete(
    config_name: str, overrides: list[str], config_dir: str | Path | None = None
) -> tuple[RunConfig, list[str]]:
    """Like ``compose_run``, with the text ``NOT_GIVEN`` for values that are missing (``???``), and their keys."""
    cfg, missing = _composed(config_name, overrides, config_dir, complete=False)
    return require_run(cfg, config_name), missing


def require_run(cfg: Job, config_name: str) -> RunConfig:
    """Raises ConfigError for the config of another job than a run."""
    if not isinstance(cfg, RunConfig):
        raise ConfigError(f"{config_name} is the config of another job ({JOB}: {cfg.job}), not of a run")
    return cfg


def _composed(
    config_name: str, overrides: list[str], config_dir: str | Path | None, *, complete: bool
) -> tuple[Job, list[str]]:
    """The config, and the keys that lack a value; complete: where that is an error."""
    folders = search_order(config_name, Path(config_dir or shipped_config_dir()).resolve(), shipped_config_dir())
    given, sources = compose_values(config_name, overrides, folders, texts := text_settings())
    for key, value in flattened(OmegaConf.to_container(given)).items():
        is_text = key in texts or key.startswith("cluster.environment.")
        kinds = (int, float, bool) if is_text else (int, float)
        if type(value) in kinds and (is_text or key.startswith("cluster.options.")):
            written = sources.written(key)
            if written is not None and (is_text or ":" in written):
                OmegaConf.update(given, key, written)
    job = given.get(JOB)
    if job not in JOBS:
        known = ", ".join(name for name in JOBS if name)
        raise ConfigError(f"{JOB} is {job!r}, expected one of {known} ({sources.place(JOB)})")
    values = _merged(_structured(JOBS[job]), given, "", sources.place)
    # OmegaConf's own list of them resolves interpolations, which may be mistakes.
    missing = [key for key, value in flattened(OmegaConf.to_container(given)).items() if value == "???"]
    if missing and complete:
        places = [f"{key} ({sources.place(key)})" for key in missing]
        raise ConfigError(f"a value is needed for {', '.join(places)}; on the command line: KEY=VALUE")
    for key in missing:
        OmegaConf.update(values, key, NOT_GIVEN)
    cfg = _built(values, "", sources.place)
    if isinstance(cfg, RunConfig):
        arm_configs(cfg, sources.place)
        for differences in cfg.arms.values():  # an arm that only names the run's own algorithm differs in nothing
            if differences.get("algorithm") == cfg.algorithm:
                del differences["algorithm"]
    return cfg, missing


@cache
def text_settings() -> frozenset[str]:
    """The keys whose values are texts, whatever else they look like."""
    types = (item for job in JOBS.values() for item in setting_types(job).items())
    return frozenset(key for key, hint in types if hint in (str, Optional[str]))


def resolved_yaml(cfg: RunConfig | RewardModelRunConfig) -> str:
    """Every setting as YAML. As a config file it composes to the same config."""
    return OmegaConf.to_yaml(OmegaConf.structured(cfg))


def default_values(job: str | None) -> dict[str, Any]:
    return OmegaConf.to_container(_structured(JOBS[job]))


def arm_configs(
    cfg: RunConfig, place: Callable[[str], str] = lambda key: f"arms.{key.split('.')[1]}"
) -> dict[str, ArmConfig]:
    """The settings of each arm by name: the section of its algorithm with the arm's differences; without arms, one
    ``policy``, and none where supervised training is all, or nothing is trained. ``replicate_baseline`` adds one.
    place: says where a key was set. Raises ``ConfigError`` for an unknown key or a bad value of an arm."""
    if not cfg.has_arms:
        return {}
    arms = {} if cfg.arms else {"policy": getattr(cfg, cfg.algorithm)}
    sections: dict[str, DictConfig] = {}  # of each algorithm, once: arms share it
    for name, differences in cfg.arms.items():
        key = f"arms.{name}"
        algorithm = differences.get("algorithm", cfg.algorithm)
        if algorithm not in ALGORITHMS:
            expected = f"one of {', '.join(ALGORITHMS)} ({place(f'{key}.algorithm')})"
            raise ConfigError(f"{key}.algorithm is {algorithm!r}, expected {expected}")
        changes = OmegaConf.create({setting: value for setting, value in differences.items() if setting != "algorithm"})
        if algorithm not in sections:
            sections[algorithm] = OmegaConf.structured(getattr(cfg, algorithm))
        arms[name] = _built(_merged(sections[algorithm], changes, f"{key}.", place), f"{key}.", place)
        try:
            cfg.check_training(arms[name], key)
            cfg.check_arm(arms[name], key)
        except SettingError as error:
            raise ConfigError(f"{error} ({place(error.key)})") from error
    if cfg.replicate_baseline:
        if REPLICATE in arms:
            added = "is the name of the arm that replicate_baseline adds: leave it out, or set replicate_baseline=false"
            raise ConfigError(f"arms.{REPLICATE} ({place(f'arms.{REPLICATE}')}) {added}")
        arms[REPLICATE] = arms[baseline_arm(arms)]
    return arms


def final_iteration(cfg: RunConfig, policy: str) -> int:
    """The number under which a policy's final evaluation is kept: the iterations of its arm, also where fewer were
    trained (``early_stop``), as the short evaluation before that iteration has the other number."""
    arms = arm_configs(cfg)
    return arms[policy].iterations if policy in arms else 0


_structured = cache(OmegaConf.structured)
"""A schema's types and defaults, which OmegaConf takes a tenth of a second to read; ``merge`` copies them."""


def _merged(schema: DictConfig, values: DictConfig, prefix: str, place: Callable[[str], str]) -> DictConfig:
    """The schema's defaults with the values, converted to its types. prefix: of the values' full keys. Raises
    ConfigError for an unknown key and for a value of another type."""
    keys = setting_types(OmegaConf.get_type(schema), prefix)
    for key, hint in keys.items():
        value = OmegaConf.select(values, key.removeprefix(prefix), default={}) if is_dataclass(hint) else {}
        if not isinstance(value, dict | DictConfig):
            shown = OmegaConf.to_container(value) if isinstance(value, Container) else value
            raise ConfigError(f"{key} is {shown!r}, expected a section of settings ({place(key)})")
    try:
        return OmegaConf.merge(schema, values)
    except ConfigKeyError as error:
        key = f"{prefix}{error.full_key}"
        raise ConfigError(f"unknown key {key} ({place(key)}){suggestion(key, keys)}") from error
    except OmegaConfBaseException as error:
        path = error.full_key.partition("[")[0] or _misplaced(values, keys, prefix)
        given, key = OmegaConf.select(values, path), f"{prefix}{path}"
        given = OmegaConf.to_container(given) if isinstance(given, Container) else given
        expected = " or ".join(map(_type_name, _kinds(keys.get(key, dict))))
        raise ConfigError(f"{key} is {given!r}, expected {expected} ({place(key)})") from error


def _kinds(hint: Any) -> Sequence[Any]:
    """The types that a setting may have."""
    return get_args(hint) if get_origin(hint) is Union else (hint,)


def _type_name(kind: Any) -> str:
    of = f", each {_type_name(get_args(kind)[0])}" if get_origin(kind) is list else ""
    return TYPE_NAMES.get(get_origin(kind) or kind, "a mapping") + of


def _misplaced(values: DictConfig, keys: Mapping[str, Any], prefix: str) -> str:
    """The first key with a list in place of a mapping, or the other way round: OmegaConf names none."""
    for key, hint in keys.items():
        value = OmegaConf.select(values, path := key.removeprefix(prefix), throw_on_resolution_failure=False)
        if isinstance(value, Container) and isinstance(value, ListConfig) != (list in map(get_origin, _kinds(hint))):
            return path
    return ""


def _built(node: DictConfig, prefix: str, place: Callable[[str], str]) -> Any:
    """The dataclass of merged values, its sections first. Raises ConfigError for what a section's checks refuse."""
    values = {}
    for name in node:
        key = f"{prefix}{name}"
        try:
            value = node[name]
            if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
                value = _built(value, f"{key}.", place)
            elif isinstance(value, Container):
                value = OmegaConf.to_object(value)
            elif isinstance(value, str) and value.startswith("~/"):
                value = str(Path(value).expanduser())
        except InterpolationResolutionError as error:
            raise ConfigError(f"{key}: {str(error).splitlines()[0]} ({place(key)})") from error
        # In the run's stored config it would be an interpolation. A section's own settings have been looked at.
        if not is_dataclass(value) and "${" in str(value):
            raise ConfigError(f'{key} has the text "${{", expected "$ {{" or $NAME without braces ({place(key)})')
        values[name] = value
    try:
        return OmegaConf.get_type(node)(**values)
    except SettingError as error:
        found = place(f"{prefix}{error.key}")
        found = place(prefix.rstrip(".")) if found == DEFAULT and prefix else found
        raise ConfigError(f"{prefix}{error} ({found})") from error


MOST = 5
OTHER_NAMES = {
    "beta": "init_kl_coef kl_beta kl_coef",
    "clip_grad": "max_grad_norm",
    "clip_low": "clip cliprange epsilon",
    "data": "dataset",
    "epochs": "num_epochs num_train_epochs",
    "every_steps": "save_steps",
    "gpus_per_node": "gpus",
    "iterations": "max_steps num_iterations",
    "limit": "max_samples num_problems num_samples",
    "lr": "learning_rate",
    "max_new_tokens": "max_completion_length max_length max_response_length max_tokens",
    "micro_batch_size": "per_device_train_batch_size",
    "minibatch_size": "batch train_batch_size",
    "name": "run_name",
    "output_dir": "output out_dir",
    "path": "model_name_or_path",
    "pipeline_model_parallel_size": "pp",
    "rank": "lora_rank r",
    "samples_per_prompt": "group_size n num_generations num_return_sequences rollout_n",
    "tensor_model_parallel_size": "tp",
}
"""Our names, and those that other trainers (TRL, verl, NeMo-RL, Hugging Face) have for the same."""


def suggestion(key: str, known: Collection[str]) -> str:
    """``; did you mean A, B or C?`` for an unknown key, or nothing where no known key is near it in name or meaning. A
    key of the same name in another section is nearer than one of another name: ``iterations`` means
    ``grpo.iterations``, ``idpo.iterations`` or that of one arm, and ``grpo.lr`` means ``grpo.optimizer.lr``. Other
    names have to be more alike across sections than within one."""
    found = _candidates(key, known)
    if not found:
        return ""
    section, _, name = found[0].partition(".")
    if section in ALGORITHMS and "." not in key:
        found = [*found, f"arms.NAME.{name} (of one arm)"]
    names = f"{', '.join(found[:-1])} or {found[-1]}" if found[1:] else found[0]
    return f"; did you mean {names}?"


def _candidates(key: str, known: Collection[str]) -> list[str]:
    section, _, name = key.rpartition(".")
    ours = next((ours for ours, others in OTHER_NAMES.items() if name in others.split()), None)
    for meant in (name, ours):
        same_name = [one for one in known if one.rpartition(".")[2] == meant]
        deeper = [one for one in same_name if section and one.startswith(f"{section}.")]
        if same_name:
            return (deeper or same_name)[:MOST]
    siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    anywhere = {one.rpartition(".")[2]: one for one in known}
    for names, alike in ((siblings, 0.5), (anywhere, 0.85)):
        near = difflib.get_close_matches(name, names, n=1, cutoff=alike)
        if near:
            return [names[near[0]]]
    return []
