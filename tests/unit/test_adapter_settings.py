"""What all adapters share: their settings, and the versions of trainers that they were tested with."""

import tomllib
import warnings
from pathlib import Path

import pytest

from nemo_edo.adapters import exploration_settings
from nemo_edo.adapters.exploration_settings import TESTED, ExplorationSettings, warn_of_untested

ROOT = Path(__file__).parents[2]


def test_the_locked_environments_are_the_ends_of_the_tested_ranges():
    ends = {"trl-oldest": ("trl", 0), "trl": ("trl", 1), "verl": ("verl", 1)}
    for environment, (package, end) in ends.items():
        project = tomllib.loads((ROOT / "requirements" / environment / "pyproject.toml").read_text(encoding="utf-8"))
        [pinned] = [one for one in project["project"]["dependencies"] if one.startswith(f"{package}==")]
        assert pinned.removeprefix(f"{package}==").startswith(f"{TESTED[package][end]}.")
    page = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8").replace("\n", " ")
    names = {"trl": "TRL", "nemo-rl": "NeMo-RL", "rllm": "rLLM", "skyrl": "SkyRL"}
    for package, (oldest, newest) in TESTED.items():
        tested = oldest if oldest == newest else f"{oldest} {'and' if package == 'nemo-rl' else 'to'} {newest}"
        assert f"{names.get(package, package)} {tested}" in page, package


@pytest.mark.parametrize(("installed", "warns"), [
    ("1.4.9", True), ("1.5.0", False), ("1.16.3", False), ("1.17.0.dev0", True),
])
def test_a_version_outside_of_the_tested_range_warns_once(monkeypatch, installed, warns):
    monkeypatch.setattr(exploration_settings, "version", lambda package: installed)
    warn_of_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            warn_of_untested("trl")
    assert [str(one.message) for one in caught] == (
        [f"nemo_edo's adapter was tested with trl 1.5 to 1.16; this is {installed}"] if warns else [])


@pytest.mark.parametrize(("values", "message"), [
    ({"coefficient": "0.1"}, "exploration_coefficient is '0.1'"),
    ({"coefficient": True}, "exploration_coefficient is True"),
    ({"coefficient": 0.1, "log_ratio_floor": 0.0}, "log_ratio_floor is 0.0"),
])
def test_settings_that_are_no_numbers_are_errors_that_name_them(values, message):
    with pytest.raises(ValueError, match=message):
        ExplorationSettings(**values)
