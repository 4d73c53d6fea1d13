"""Composes the files of ``conf/`` and a command line's overrides by Hydra, and knows where each value comes from."""

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigTypeError, GrammarParseError, OmegaConfBaseException

from nemo_edo.config.checks import without_passwords
from nemo_edo.errors import UserError
from nemo_edo.utils.wording import did_you_mean

DEFAULT = "a default of nemo_edo/config/"
EXPERIMENT = "experiment"  # a setting, and a folder of complete configs that Hydra would take for a group


class ConfigError(UserError):
    """A configuration that cannot be run, in one line: the key, where it is set, and what would be right."""

    def __init__(self, message: str) -> None:
        super().__init__(without_passwords(message))


def bad_override(override: Override, what: str) -> ConfigError:
    return ConfigError(f"command line: {override.input_line}: {what}")


@dataclass(frozen=True)
class Sources:
    """What a configuration was composed from, to tell where a key was set."""

    config_name: str
    choices: list[str]  # overrides that choose files
    folders: list[Path]
    setters: list[Override]  # overrides that set values, in the order of the command line

    @cached_property
    def files(self) -> list[tuple[Path, str]]:
        """Each file with its package (the key that its content is under), in the order in which they were merged:
        found only for an error, since Hydra takes a third of the composition's time for it."""
        with initialize_config_dir(str(self.folders[0]), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            defaults = loader.compute_defaults_list(self.config_name, self.choices, RunMode.RUN).defaults
        found = []
        for default in defaults:
            if default.config_path.partition("/")[0] != "hydra":
                candidates = [folder / f"{default.config_path}.yaml" for folder in self.folders]
                found.append((next(path for path in candidates if path.is_file()), default.package))
        return found

    def place(self, key: str) -> str:
        """``command line: OVERRIDE`` or ``FILE:LINE``, whichever set the key last; otherwise that it is a default."""
        found = self._setter(key)
        if isinstance(found, Override):
            return f"command line: {found.input_line}"
        return DEFAULT if found is None else f"{_shown(found[0])}:{found[1].start_mark.line + 1}"

    def written(self, key: str) -> str | None:
        """The key's value as a file has it, whatever YAML makes of it: 24:00:00 would be a number to base 60. None
        where no file set it last, or to no single value."""
        found = self._setter(key)
        is_scalar = isinstance(found, tuple) and isinstance(found[2], yaml.ScalarNode)
        return found[2].value if is_scalar else None

    def _setter(self, key: str) -> Override | tuple[Path, yaml.Node, yaml.Node] | None:
        """The override, or the file with the nodes of the key's last part and its value."""
        for override in reversed(self.setters):
            names = f"{override.key_or_group}.", f"{key}."
            if names[1].startswith(names[0]) or names[0].startswith(names[1]):
                return override
        for path, package in reversed(self.files):
            if package and not key.startswith(f"{package}."):
                continue
            name, node = None, yaml.compose(path.read_text(encoding="utf-8"))
            for part in key[len(package) :].lstrip(".").split("."):
                entries = node.value if isinstance(node, yaml.MappingNode) else []
                name, node = next(((name, value) for name, value in entries if name.value == part), (None, None))
            if name is not None:
                return path, name, node
        return None


def compose_values(
    config_name: str, overrides: list[str], folders: list[Path], texts: Collection[str] = ()
) -> tuple[DictConfig, Sources]:
    """The composed values, not yet typed, and their sources. Hydra reads the files that the config and the overrides
    choose; overrides of values are applied here, since the files have differences only, of which Hydra would take a
    new key for a mistake. texts: the keys whose values are texts, whatever else they look like (1e-3, it's)."""
    parsed = parse_overrides(overrides, texts)
    for override in parsed:
        _check(override)
    choices = [f"hydra.searchpath=[{quoted(f'file://{folders[1]}')}]"]
    choices += [override.input_line for override in parsed if _is_choice(override, folders)]
    try:
        with initialize_config_dir(str(folders[0]), version_base="1.3"):
            for override in parsed:
                if _names_arms(override):
                    choices.append(_choice_of_arms(override, config_name, choices[0]))
            values = compose(config_name, choices)
    except (yaml.YAMLError, UnicodeDecodeError, HydraException, OmegaConfBaseException) as error:
        raise _failed_composition(error, overrides, folders) from error
    OmegaConf.set_struct(values, False)
    setters = [one for one in parsed if not _is_choice(one, folders) and not _names_arms(one)]
    for override in setters:
        key, value = override.key_or_group, override.value()
        parent, _, name = key.rpartition(".")
        if override.type is OverrideType.DEL:
            siblings = OmegaConf.select(values, parent) if parent else values
            names = sorted(map(str, siblings)) if isinstance(siblings, DictConfig) else []
            if name not in names:
                nothing = f"the config has no arm {name}" if parent == "arms" else f"no file of the config sets {key}"
                raise bad_override(override, f"{nothing}{_choices(name, names) if names else ''}")
            if value is not None and siblings[name] != value:
                raise bad_override(override, f"{key!r} is {siblings[name]!r}, not {value!r}")
            del siblings[name]
            continue
        is_new = override.type is OverrideType.ADD and key != EXPERIMENT  # Hydra's words for choosing a file there
        if is_new and not isinstance(value, dict | list) and OmegaConf.select(values, key) is not None:
            raise bad_override(override, f"{key} is set already; ++{override.input_line.lstrip('+')} replaces it")
        section, _, path = key.partition(".")
        arm, arms = path.partition(".")[0], values.get("arms") or {}
        changes_arms = section == "arms" and override.type is OverrideType.CHANGE
        if changes_arms and arm and arm not in arms:
            missing = f"the config has no arm {arm}{_choices(arm, sorted(arms))}; +{override.input_line} adds one"
            raise bad_override(override, missing)
        # arms={...} replaces the arms that are there
        try:
            OmegaConf.update(values, key, value, merge=bool(arm) or not changes_arms, force_add=True)
        except GrammarParseError as error:
            why = f'"${{" begins an interpolation, which cannot be read ({str(error).splitlines()[0]})'
            raise bad_override(override, f'{why}; write "$ {{" in a text') from error
        except ConfigTypeError as error:
            raise bad_override(override, str(error).splitlines()[0]) from error
    kept = [override for override in setters if override.type is not OverrideType.DEL]
    return values, Sources(config_name, choices, folders, kept)


def quoted(text: str) -> str:
    """A text for Hydra's override grammar, whatever commas and equal signs are in it."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", escaped) + "'"


def parse_overrides(overrides: Sequence[str], texts: Collection[str]) -> list[Override]:
    """The overrides. A value of ``texts`` that Hydra takes for a number, or cannot read, is the text as it is. Raises
    ConfigError."""
    parser, parsed = OverridesParser.create(), []
    try:
        for line in overrides:
            key, equals, value = line.partition("=")
            name = key.lstrip("+")
            is_text = bool(equals) and (name in texts or name.startswith("cluster.environment."))
            try:
                [override] = parser.parse_overrides([line])
                read = override.value()  # Hydra takes backslashes for its own, and sort(a) for a function
                is_changed = isinstance(read, str) and read != value.strip() and value[:1] not in ("'", '"')
                as_it_is = is_text and (isinstance(read, int | float) or is_changed)
            except OverrideParseException:
                if not is_text or value[:1] in ("'", '"'):
                    raise
                as_it_is = True
            if as_it_is:
                override = replace(parser.parse_override(f"{key}=text"), _value=value, input_line=line)
            parsed.append(override)
    except OverrideParseException as error:
        # Hydra cannot read some values, such as a path with letters that are not ASCII, but for in quotes.
        key, equals, value = error.override.partition("=")
        in_quotes, hint = f'{key}{equals}"{value}"', ""
        with suppress(HydraException):
            parser.parse_override(in_quotes)
            hint = f"; quote a value that is more than plain letters, for the shell as well: '{in_quotes}'"
        raise ConfigError(f"command line: {error.override}: not in Hydra's form KEY=VALUE{hint}") from error
    return parsed


def _check(override: Override) -> None:
    if override.is_sweep_override():
        raise bad_override(override, "write a list as [a,b], quote a text with commas, or add -m for a sweep")
    if override.key_or_group.partition(".")[0] in ("", "hydra"):
        raise bad_override(override, "names no setting of a run")
    if override.key_or_group == "arm" and override.package is None:
        hint = "arms are chosen by arms=NAME or arms=[NAME,NAME]; ~arms.NAME leaves one out"
        raise bad_override(override, hint)


def _is_choice(override: Override, folders: list[Path]) -> bool:
    """Whether the override chooses a group's file (``data=gsm8k``), as Hydra tells them apart."""
    is_group = any((folder / override.key_or_group).is_dir() for folder in folders)
    return is_group and override.key_or_group != EXPERIMENT and not isinstance(override.value(), dict)


def _names_arms(override: Override) -> bool:
    return override.key_or_group == "arms" and isinstance(override.value(), str | list)


def _choice_of_arms(override: Override, config_name: str, searchpath: str) -> str:
    """``arms=NAME`` and ``arms=[NAME,NAME]`` in Hydra's words: choices of the group ``arm``, put under ``arms``. They
    replace the names that the config's defaults list chooses; where it chooses none, they are appended to it."""
    loader, names = GlobalHydra.instance().config_loader(), override.input_line.partition("=")[2]
    try:
        loader.compute_defaults_list(config_name, [searchpath, "arm@arms=[]"], RunMode.RUN)
    except ConfigCompositionException:  # no such choice to override; what else is wrong, the composition will say
        return f"+arm@arms={names}"
    return f"arm@arms={names}"


def _failed_composition(error: Exception, overrides: list[str], folders: list[Path]) -> ConfigError:
    if isinstance(error, MissingConfigException):
        group, _, choice = error.missing_cfg_file.rpartition("/")
        names = sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
        place = "defaults"
        for line in overrides:
            words = re.split(r"[=,\s\[\]]+", line.lstrip("+"))
            if words[0] in ((group, "arms") if group == "arm" else (group,)) and choice in words:
                place = f"command line: {line}"
        return ConfigError(f"{place}: no config {choice} in group {group}{_choices(choice, names)}")
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        return ConfigError(f"{_shown(Path(mark.name))}:{mark.line + 1}: invalid YAML: {error.problem}")
    if isinstance(error, yaml.reader.ReaderError):
        return ConfigError(f"{_shown(Path(error.name))}: not text: {error.reason}")
    if isinstance(error, UnicodeDecodeError):  # which does not name the file
        return ConfigError(f"a YAML file of {' or '.join(map(_shown, folders))} is not UTF-8 text: {error}")
    message = " ".join(str(error).split())
    for line in overrides:
        if message.startswith(f"Multiple values for {line.lstrip('+').partition('=')[0]}."):
            replaced = line.lstrip("+")
            group = replaced.partition("=")[0]
            return ConfigError(f"command line: {line}: the config chooses {group} already; {replaced} replaces it")
    return ConfigError(message)


def search_order(config_name: str, own: Path, shipped: Path) -> list[Path]:
    """Both folders, the one with the config first. Raises ConfigError where none has it, or one hides a file."""
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


def _choices(name: str, names: list[str]) -> str:
    return f"{did_you_mean(name, names)} (there are: {', '.join(names)})"


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
