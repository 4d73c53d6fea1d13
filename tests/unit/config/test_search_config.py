"""Settings of SearchLLM."""

from __future__ import annotations

import pytest

from nemo_edo.config.search import MEANS, WIDTHS, SearchLLMConfig
from nemo_edo.configuration import ConfigError, compose_run
from nemo_edo.run_folder import RunFolder
from nemo_edo.test_time import search_llm

MODEL = ["model.path=DIR", "data.test=FILE", "search.reward_model=PRM"]


def test_a_model_is_searched_from_a_test_file_alone():
    cfg = compose_run("search", MODEL)
    assert (cfg.algorithm, cfg.search.reward_model, cfg.data.train) == ("none", "PRM", None)


def test_the_choices_are_those_of_the_search():
    assert (WIDTHS, MEANS) == (search_llm.WIDTHS, search_llm.MEANS)


def test_the_defaults_make_a_search():
    settings = SearchLLMConfig()
    names = ("steps", "branches", "width", "exploration", "prior_precision", "noise_variance", "width_kind", "mean")
    search_llm.SearchConfig(**{name: getattr(settings, name) for name in names})


@pytest.mark.parametrize(("override", "message"), [
    ("search.steps=0", "search.steps is 0, expected a number above 0"),
    ("search.branches=0", "search.branches is 0, expected a number above 0"),
    ("search.width=-1", "search.width is -1, expected a number above 0"),
    ("search.part_size=0", "search.part_size is 0, expected a number above 0"),
    ("search.batch_tokens=0", "search.batch_tokens is 0, expected a number above 0"),
    ("search.exploration=-0.1", "search.exploration is -0.1, expected a finite number of at least 0"),
    ("search.exploration=inf", "search.exploration is inf, expected a finite number of at least 0"),
    ("search.prior_precision=0", "search.prior_precision is 0.0, expected a finite number above 0"),
    ("search.noise_variance=nan", "search.noise_variance is nan, expected a finite number above 0"),
    ("search.width_kind=std", "search.width_kind is 'std', expected one of sd, variance"),
    ("search.mean=gp", "search.mean is 'gp', expected one of reward, linear"),
    ("search.dtype=fp8", "search.dtype is 'fp8', expected one of auto, float32, bfloat16"),
    ("search.name=a/b", "search.name is 'a/b', expected a folder name"),
    ("search.name=.a", "search.name is '.a', expected a folder name"),
    ("search.name=''", "search.name is '', expected a folder name"),
    ("search.seed=-1", "search.seed is -1, expected null or a number of at least 0"),
    ("search.trees=-1", "search.trees is -1, expected a number of at least 0"),
    ("search.step_separator=''", "search.step_separator is '', expected null, or a text"),
    ("search.beam=3", "unknown key search.beam"),
])  # fmt: skip
def test_what_does_not_fit_is_an_error(override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        compose_run("search", [*MODEL, override])


def test_a_finished_run_may_be_searched_again_with_other_settings(tmp_path):
    from nemo_edo.configuration import resolved_yaml

    folder = RunFolder(tmp_path / "run")
    folder.open(resolved_yaml(compose_run("search", MODEL)))
    folder.close()
    folder.check_free(resolved_yaml(compose_run("search", [*MODEL, "search.width=7"])))
