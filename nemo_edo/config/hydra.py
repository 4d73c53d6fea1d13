"""Composes the files of ``conf/`` and a command line's overrides by Hydra, and knows where each value comes from."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_edo.errors import UserError
from nemo_edo.utils.wording import did_you_mean

DEFAULT = "a default of nemo_edo/config/"
EXPERIMENT = "experiment"
"""A setting, and a folder of complete configs that Hydra would take for a group to choose from."""
_OF_PASSWORDS = re.compile(r"(?<=://)[^\s'\",\]]*[@?#][^\s'\",\]]*")


class ConfigError(UserError):
    """A configuration that cannot be run, in one line: the key, where it is set, and what would be right. What may be a
    password in a URL is not shown."""

    def __init__(self, message: str) -> None:
        super().__init__(_OF_PASSWORDS.sub("***", message))


@dataclass(frozen=True)
class Sources:
    """What a configuration was composed from, to tell where a key was set."""

    overrides: list[Override]
    """Overrides that set values, in the order of the command line."""
    find_files: Callable[[], list[tuple[Path, str]]]

    @cached_property
    def files(self) -> list[tuple[Path, str]]:
        """Each file with its package (the key that its content is under), in the order in which they were merged:
        found only for an error, since Hydra takes a third of the composition's time for it."""
        return self.find_files()

    def place(self, key: str) -> str:
        """``command line: OVERRIDE`` or ``FILE:LINE``, whichever set the key last; otherwise that it is a default."""
        for override in reversed(self.overrides):
            if f"{key}.".startswith(f"{override.key_or_group}."):
                return f"command line: {override.input_line}"
        for path, package in reversed(self.files):
            line = _line_of(path, key, package)
            if line:
                return f"{_shown(path)}:{line}"
        return DEFAULT


_OF_FILES = (yaml.YAMLError, UnicodeDecodeError)


def compose_values(config_name: str, overrides: list[str], folders: list[Path]) -> tuple[DictConfig, Sources]:
    """The composed values, not yet typed, and their sources."""
    parsed, searchpath = _parse(overrides), f"hydra.searchpath=[file://{folders[1]}]"
    try:
        with initialize_config_dir(str(folders[0]), version_base="1.3"):
            parsed = _arms_by_name(parsed, config_name, searchpath)
            setters = [override for override in parsed if not _is_choice(override, folders)]
            of_arms = [override for override in setters if _changes_arms(override)]
            for_hydra = [
                override for override in parsed if override.key_or_group != EXPERIMENT and override not in of_arms
            ]
            lines = [_line(override, override in setters) for override in for_hydra] + [searchpath]
            try:
                values = compose(config_name, lines)
            except ConfigCompositionException:
                kept_lines = [line for line in lines if not line.startswith("~")]
                _check_deletions(parsed, compose(config_name, kept_lines), folders)
                raise
            for override in parsed:
                if override.key_or_group == EXPERIMENT:
                    OmegaConf.update(values, EXPERIMENT, override.value(), force_add=True)
            for override in of_arms:
                _change_arms(values, override)
    except (*_OF_FILES, MissingConfigException, HydraException, OmegaConfBaseException) as error:
        raise _failed_composition(error, overrides, folders) from error
    kept = [override for override in setters if override.type is not OverrideType.DEL]
    return values, Sources(kept, partial(_files, config_name, lines, folders))


def _files(config_name: str, lines: list[str], folders: list[Path]) -> list[tuple[Path, str]]:
    with initialize_config_dir(str(folders[0]), version_base="1.3"):
        defaults = _defaults(config_name, lines)
    return [_file_of(default, folders) for default in defaults if default.config_path.partition("/")[0] != "hydra"]


def _failed_composition(error: Exception, overrides: list[str], folders: list[Path]) -> ConfigError:
    if isinstance(error, MissingConfigException):
        return ConfigError(_missing_choice(error, overrides, folders))
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        return ConfigError(f"{_shown(Path(mark.name))}:{mark.line + 1}: invalid YAML: {error.problem}")
    if isinstance(error, yaml.reader.ReaderError):
        return ConfigError(f"{_shown(Path(error.name))}: not text: {error.reason}")
    if isinstance(error, UnicodeDecodeError):  # which does not name the file
        paths = (path for folder in folders for path in sorted(folder.rglob("*.yaml")))
        return ConfigError(f"{_shown(next(path for path in paths if not _is_text(path)))}: not UTF-8 text: {error}")
    message = " ".join(str(error).split())
    for line in overrides:
        group = line.lstrip("+").partition("=")[0]
        if message.startswith(f"Multiple values for {group}."):
            return ConfigError(
                f"command line: {line}: the config chooses {group} already; {line.lstrip('+')} replaces it"
            )
    return ConfigError(message)


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _line(override: Override, sets_a_value: bool) -> str:
    """++ sets a key whether or not a file has it: the files have differences from config/ only."""
    add = sets_a_value and override.type is OverrideType.CHANGE
    return f"++{override.input_line}" if add else override.input_line


def _defaults(config_name: str, lines: list[str]) -> list[ResultDefault]:
    """The files that the config is composed from, in the order in which they are merged."""
    return GlobalHydra.instance().config_loader().compute_defaults_list(config_name, lines, RunMode.RUN).defaults


def _arms_by_name(parsed: list[Override], config_name: str, searchpath: str) -> list[Override]:
    """``arms=NAME`` and ``arms=[NAME,NAME]`` in Hydra's words: choices of the group ``arm``, put under ``arms``.

    They replace the names that the config's defaults list chooses; where it chooses none, they are appended to it.
    """
    named = [override.key_or_group == "arms" and isinstance(override.value(), str | list) for override in parsed]
    if not any(named):
        return parsed
    lines = [override.input_line for override in parsed]
    try:
        _defaults(config_name, [searchpath, "arm@arms=[]"])
        choice = "arm@arms"
    except ConfigCompositionException:  # no such choice to override; what else is wrong, the composition will say
        choice = "+arm@arms"
    return _parse(
        [
            f"{choice}={line.partition('=')[2]}" if is_named else line
            for line, is_named in zip(lines, named, strict=True)
        ]
    )


def _changes_arms(override: Override) -> bool:
    """``arms={...}`` and ``arms.NAME.KEY=VALUE``, and with ``+``. Hydra would merge the first into the arms that are
    there, and make a new arm of a misspelled name."""
    return override.key_or_group.partition(".")[0] == "arms" and override.type is not OverrideType.DEL


def _change_arms(values: DictConfig, override: Override) -> None:
    """Raises ConfigError for an arm that the config does not have."""
    _, _, path = override.key_or_group.partition(".")
    arms, changes = values.get("arms") or {}, override.type is OverrideType.CHANGE
    name = path.partition(".")[0]
    if name and name not in arms and changes:
        raise ConfigError(
            f"command line: {override.input_line}: the config has no arm {name}{_choices(name, sorted(arms))}; "
            f"+{override.input_line} adds one"
        )
    OmegaConf.update(values, override.key_or_group, override.value(), merge=bool(name) or not changes, force_add=True)


def _check_deletions(parsed: list[Override], values: DictConfig, folders: list[Path]) -> None:
    """``values`` are composed without the deletions. Raises ConfigError for ``~KEY`` of a key that they do not have."""
    for override in parsed:
        key = override.key_or_group
        if override.type is not OverrideType.DEL or _is_choice(override, folders):
            continue
        parent, _, name = key.rpartition(".")
        siblings = OmegaConf.select(values, parent) if parent else values
        names = sorted(map(str, siblings)) if isinstance(siblings, DictConfig) else []
        if name not in names:
            nothing = f"the config has no arm {name}" if parent == "arms" else f"no file of the config sets {key}"
            raise ConfigError(f"command line: {override.input_line}: {nothing}{_choices(name, names) if names else ''}")


def _parse(overrides: list[str]) -> list[Override]:
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except OverrideParseException as error:
        raise ConfigError(
            f"command line: {error.override}: not in Hydra's form KEY=VALUE{_quoted(error.override)}"
        ) from error
    for override in parsed:
        if override.is_sweep_override():
            hint = "write a list as [a,b], quote a text with commas, or add -m for a sweep"
            raise ConfigError(f"command line: {override.input_line}: {hint}")
        if override.key_or_group.partition(".")[0] in ("", "hydra"):
            raise ConfigError(f"command line: {override.input_line}: names no setting of a run")
        if override.key_or_group == "arm" and override.package is None:
            hint = "arms are chosen by arms=NAME or arms=[NAME,NAME]; ~arms.NAME leaves one out"
            raise ConfigError(f"command line: {override.input_line}: {hint}")
    return parsed


def _quoted(line: str) -> str:
    """What to write where Hydra cannot read a value, such as a path with letters that are not ASCII: it in quotes."""
    key, equals, value = line.partition("=")
    quoted = f'{key}{equals}"{value}"'
    try:
        OverridesParser.create().parse_override(quoted)
    except HydraException:
        return ""
    return f"; quote a value that is more than plain letters, for the shell as well: '{quoted}'"


def _is_choice(override: Override, folders: list[Path]) -> bool:
    """Whether the override chooses a group's file (``data=gsm8k``), as Hydra tells them apart."""
    is_group = any((folder / override.key_or_group).is_dir() for folder in folders)
    return is_group and override.key_or_group != EXPERIMENT and not isinstance(override.value(), dict)


def _file_of(default: ResultDefault, folders: list[Path]) -> tuple[Path, str]:
    candidates = [folder / f"{default.config_path}.yaml" for folder in folders]
    return next(path for path in candidates if path.is_file()), default.package


def search_order(config_name: str, own: Path, shipped: Path) -> list[Path]:
    """Both folders, first the one that has the config. Raises ConfigError where none has it, and where a shipped config
    would hide files of the user's folder."""
    if not own.is_dir():
        raise ConfigError(f"no config named {config_name}: {_shown(own)} is not a folder")
    if (own / f"{config_name}.yaml").is_file():
        return [own, shipped]
    group, slash, _ = config_name.rpartition("/")
    found = dict.fromkeys((own, shipped))  # one folder where --config-path names no other
    if not any((folder / group).is_dir() for folder in found):
        raise ConfigError(f"no config named {config_name}: {_shown(own)} has no folder {group}")
    names = [f"{group}{slash}{path.stem}" for folder in found for path in sorted((folder / group).glob("*.yaml"))]
    if config_name not in names:
        raise ConfigError(f"no config named {config_name} in {_shown(own)}{_choices(config_name, names)}")
    for path in sorted(own.rglob("*.yaml")):
        if (shipped / path.relative_to(own)).is_file():
            reads = f"{config_name} is shipped and reads the shipped file of this name"
            raise ConfigError(f"{_shown(path)}: {reads}; rename it")
    return [shipped, own]


def _missing_choice(error: MissingConfigException, overrides: list[str], folders: list[Path]) -> str:
    group, _, choice = error.missing_cfg_file.rpartition("/")
    names = sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
    keys = (group, "arms") if group == "arm" else (group,)
    words = {line: re.split(r"[=,\s\[\]]+", line.lstrip("+")) for line in overrides}
    place = next(
        (f"command line: {line}" for line in overrides if words[line][0] in keys and choice in words[line]), ""
    )
    return f"{place or 'defaults'}: no config {choice} in group {group}{_choices(choice, names)}"


def _choices(name: str, names: list[str]) -> str:
    return f"{did_you_mean(name, names)} (there are: {', '.join(names)})"


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _line_of(path: Path, key: str, package: str) -> int | None:
    """The line of a YAML file that sets the key, if the file does."""
    if package and not key.startswith(f"{package}."):
        return None
    node, line = yaml.compose(path.read_text(encoding="utf-8")), None
    for part in key[len(package) :].lstrip(".").split("."):
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        found = ((name.start_mark.line + 1, value) for name, value in entries if name.value == part)
        line, node = next(found, (None, None))
    return line
