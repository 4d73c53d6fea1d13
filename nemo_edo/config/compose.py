"""A run's configuration: what ``config.hydra`` makes of files and a command line's overrides, on ``config``'s types.

Hydra composes without the types, so that files may have differences only and an override may name any key. The types
are checked here, where the source of a value is still known: each error is one line that names the full key, the file
and line or the override that it comes from, and what would be right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from nemo_edo.config import ALGORITHMS, LoopConfig, RewardModelRunConfig, RunConfig, ScoreConfig
from nemo_edo.config.arms import REPLICATE, baseline_arm
from nemo_edo.config.hydra import DEFAULT, ConfigError, Sources, compose_values, search_order
from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.config.suggestions import suggestion

TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
NOT_GIVEN = "(not given)"
MAY_BE_INFINITE = ("ceiling", "floor")
"""Last names of keys: a guard's bound may be switched off."""
JOB = "job"
"""The key that says which job a config is for, where it is not a run's."""
JOBS = {"reward_model": RewardModelRunConfig, "score": ScoreConfig}


def compose_run(config_name: str, overrides: list[str], config_dir: str | Path | None = None) -> RunConfig:
    """The checked configuration of a run.

    ``config_name`` names a file of ``config_dir`` (``None``: the shipped ``conf/``) without its ``.yaml``, such as
    ``quickstart`` or ``experiment/main/gsm8k_llama3_grpo``; ``overrides`` are in Hydra's syntax. A config or group that
    ``config_dir`` lacks comes from the shipped ``conf/``. Raises ``ConfigError``.
    """
    return require_run(compose_job(config_name, overrides, config_dir), config_name)


def require_run(cfg: RunConfig | RewardModelRunConfig | ScoreConfig, config_name: str) -> RunConfig:
    """Raises ConfigError for the config of another job than a run."""
    if not isinstance(cfg, RunConfig):
        raise ConfigError(f"{config_name} is the config of another job ({JOB}: {cfg.job}), not of a run")
    return cfg


def compose_job(
    config_name: str, overrides: list[str], config_dir: str | Path | None = None
) -> RunConfig | RewardModelRunConfig | ScoreConfig:
    """Like ``compose_run``, for a config that may be another job's: its key ``job`` says which."""
    values, sources, missing = _composed(config_name, overrides, config_dir)
    if missing:
        places = [f"{key} ({sources.place(key)})" for key in missing]
        raise ConfigError(f"a value is needed for {', '.join(places)}; on the command line: KEY=VALUE")
    schema = _schema(values, sources)
    return _checked(values, sources) if schema is RunConfig else _typed(schema, values, "", sources.place)


def compose_incomplete(
    config_name: str, overrides: list[str], config_dir: str | Path | None = None
) -> tuple[RunConfig, list[str]]:
    """Like ``compose_run``, for a configuration that may lack values (``???``): it has the text ``NOT_GIVEN`` in their
    place. Returns their keys as well."""
    values, sources, missing = _composed(config_name, overrides, config_dir)
    for key in missing:
        OmegaConf.update(values, key, NOT_GIVEN)
    return _checked(values, sources), missing


def _composed(
    config_name: str, overrides: list[str], config_dir: str | Path | None
) -> tuple[DictConfig, Sources, list[str]]:
    """The composed values with known keys only, their sources, and the keys that lack a value."""
    folders = search_order(config_name, Path(config_dir or shipped_config_dir()).resolve(), shipped_config_dir())
    values, sources = compose_values(config_name, overrides, folders)
    plain = OmegaConf.to_container(values)
    _check_keys(plain, _schema_keys(_schema(values, sources)), "", sources.place)
    return values, sources, _missing(plain)


def _schema(values: DictConfig, sources: Sources) -> type:
    """The dataclass of the job that the values describe."""
    job = values.get(JOB)
    if job not in (None, *JOBS):
        raise ConfigError(f"{JOB} is {job!r}, expected one of {', '.join(JOBS)} ({sources.place(JOB)})")
    return RunConfig if job is None else JOBS[job]


def _checked(values: DictConfig, sources: Sources) -> RunConfig:
    cfg = _typed(RunConfig, values, "", sources.place)
    _arm_configs(cfg, sources.place)
    for differences in cfg.arms.values():  # an arm that only names the run's own algorithm differs in nothing
        if differences.get("algorithm") == cfg.algorithm:
            del differences["algorithm"]
    return cfg


def arm_configs(cfg: RunConfig) -> dict[str, LoopConfig]:
    """The settings of each arm by name: the section of its algorithm with the arm's differences; without arms, one
    ``policy``, and none where supervised training is all, or nothing is trained. ``replicate_baseline`` adds one.

    Raises ``ConfigError`` for an unknown key or a bad value of an arm (``compose_run`` has checked that already).
    """
    return _arm_configs(cfg, lambda key: f"arms.{key.split('.')[1]}")


def resolved_yaml(cfg: RunConfig | RewardModelRunConfig) -> str:
    """Every setting as YAML. As a config file it composes to the same config."""
    return OmegaConf.to_yaml(OmegaConf.structured(cfg))


def default_values(job: str | None) -> dict[str, Any]:
    """The default of every setting of a job; ``???`` where there is none."""
    return OmegaConf.to_container(_structured(RunConfig if job is None else JOBS[job]))


def _arm_configs(cfg: RunConfig, place: Callable[[str], str]) -> dict[str, LoopConfig]:
    if not cfg.has_arms:
        return {}
    arms = {} if cfg.arms else {"policy": getattr(cfg, cfg.algorithm)}
    for name, differences in cfg.arms.items():
        prefix = f"arms.{name}."
        algorithm = differences.get("algorithm", cfg.algorithm)
        if algorithm not in ALGORITHMS:
            key = f"{prefix}algorithm"
            raise ConfigError(f"{key} is {algorithm!r}, expected one of {', '.join(ALGORITHMS)} ({place(key)})")
        section = getattr(cfg, algorithm)
        _check_keys(differences, {**_schema_keys(type(section), prefix), f"{prefix}algorithm": str}, prefix, place)
        changes = {key: value for key, value in differences.items() if key != "algorithm"}
        arms[name] = _typed(section, OmegaConf.create(changes), prefix, place)
        try:
            cfg.check_training(arms[name], f"arms.{name}")
            cfg.check_arm(arms[name], f"arms.{name}")
        except ValueError as error:
            raise ConfigError(f"{error} ({place(str(error).split()[0])})") from error
    if cfg.replicate_baseline:
        if REPLICATE in arms:
            raise ConfigError(
                f"arms.{REPLICATE} ({place(f'arms.{REPLICATE}')}) is the name of the arm that replicate_baseline adds; "
                "choose another name"
            )
        arms[REPLICATE] = arms[baseline_arm(arms)]
    return arms


@cache
def _schema_keys(schema: type, prefix: str = "") -> dict[str, Any]:
    """The type of every setting and section of a dataclass by its full key; a section's type is its dataclass."""
    keys = {}
    for name, hint in get_type_hints(schema).items():
        keys[prefix + name] = hint
        if is_dataclass(hint):
            keys |= _schema_keys(hint, f"{prefix}{name}.")
    return keys


def _check_keys(values: dict, keys: dict[str, Any], prefix: str, place: Callable[[str], str]) -> None:
    """Every key is known, every section a mapping, and every number finite, except a bound's."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key not in keys:
            raise ConfigError(f"unknown key {key} ({place(key)}){suggestion(key, keys)}")
        if is_dataclass(keys[key]):
            if not isinstance(value, dict):
                raise ConfigError(f"{key} is {value!r}, expected a section of settings ({place(key)})")
            _check_keys(value, keys, f"{key}.", place)
        elif isinstance(value, float) and not math.isfinite(value) and name not in MAY_BE_INFINITE:
            raise ConfigError(f"{key} is {value!r}, expected a finite number ({place(key)})")


def _missing(values: dict, prefix: str = "") -> list[str]:
    """The full keys whose value is ``???``."""
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _missing(value, f"{prefix}{name}.")
        elif value == "???":
            found.append(f"{prefix}{name}")
    return found


def _typed(schema: Any, values: DictConfig, prefix: str, place: Callable[[str], str]) -> Any:
    """The dataclass (or the instance that the values change) with the values, converted and checked."""
    keys = _schema_keys(schema if isinstance(schema, type) else type(schema), prefix)
    try:
        merged = OmegaConf.merge(_structured(schema) if isinstance(schema, type) else schema, values)
        return OmegaConf.to_object(merged)
    except InterpolationResolutionError as error:
        key = f"{prefix}{error.full_key}"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]} ({place(key)})") from error
    except OmegaConfBaseException as error:
        key, given = f"{prefix}{error.full_key}", OmegaConf.to_container(values)
        for part in error.full_key.split("."):
            given = given[part]
        raise ConfigError(f"{key} is {given!r}, expected {_type_name(keys.get(key, dict))} ({place(key)})") from error
    except ValueError as error:
        raise _failed_check(str(error), keys, prefix, merged, place) from error


@cache
def _structured(schema: type) -> DictConfig:
    """A schema's types and defaults, which OmegaConf takes a tenth of a second to read; ``merge`` copies them."""
    return OmegaConf.structured(schema)


def _failed_check(
    message: str, keys: dict[str, Any], prefix: str, merged: DictConfig, place: Callable[[str], str]
) -> ConfigError:
    """A dataclass's own check with its place. Its message begins with the key, but a check knows an arm as ``grpo``
    or ``idpo`` and an optimizer as ``optimizer``: this looks for the settings of that name and value."""
    message = re.sub(rf"\b({'|'.join(ALGORITHMS)})\.", lambda _: prefix, message) if prefix else message
    named = message.split(" ", 1)[0].rstrip(":")
    alike = [key for key in keys if f".{key}".endswith(f".{named}")]
    same_value = [key for key in alike if f" is {OmegaConf.select(merged, key.removeprefix(prefix))!r}," in message]
    found = same_value or alike
    places = {place(key) for key in found} - {DEFAULT}
    full = found[0] if len(found) == 1 else named
    return ConfigError(f"{full}{message[len(named) :]} ({' or '.join(sorted(places)) or place(prefix.rstrip('.'))})")


def _type_name(hint: Any) -> str:
    """``Optional[float]`` in words: a number or null."""
    if get_origin(hint) is Union:
        return " or ".join(_type_name(part) for part in get_args(hint))
    return TYPE_NAMES.get(hint, "a mapping")
