"""Runs that train nothing: evaluations and searches of a model from a test file alone."""

import pytest

from nemo_edo.config.compose import ConfigError, arm_configs, compose_run, resolved_yaml
from nemo_edo.run.folder import RunFolder

MODEL = ["model.path=DIR", "data.test=FILE"]


@pytest.mark.parametrize("benchmark", ["gsm8k", "aime24", "s1k"])
def test_a_model_is_evaluated_on_any_benchmarks_test_file_alone(benchmark: str):
    cfg = compose_run("evaluate", [*MODEL, f"data={benchmark}"])
    assert (cfg.algorithm, cfg.sft.steps, arm_configs(cfg)) == ("none", 0, {})
    assert (cfg.data.test, cfg.data.train, cfg.data.is_built_in) == ("FILE", None, False)
    assert cfg.rewards.judge.url is None  # not needed where the judge is not asked


@pytest.mark.parametrize(("overrides", "message"), [
    ([*MODEL, "sft.steps=3"], "sft.steps is 3, expected 0 with algorithm none"),
    ([*MODEL, "+arms.a.alpha=1"], r"arms is \['a'\], expected none with algorithm none"),
    ([*MODEL, "algorithm=grpo"], "data.train is None, expected a file with data.test"),
    ([*MODEL, "generation=vllm", "generation.placement=shared"], "generation.placement is 'shared', expected apart"),
    (["model.path=DIR", "data.test=null", "data.train=FILE"], "data.test is None, expected a file with data.train"),
    ([*MODEL, "evaluation.temperature=[1.0,0]"], r"temperature is \[1.0, 0.0\], expected different numbers"),
    ([*MODEL, "evaluation.tuning_problems=8"], "evaluation.tuning_problems is 8, expected 0 with a single"),
])
def test_what_does_not_fit_is_an_error(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        compose_run("evaluate", overrides)


def test_a_finished_search_may_be_repeated_with_other_settings(tmp_path):
    first = compose_run("search", [*MODEL, "search.reward_model=PRM"])
    assert (first.algorithm, first.search.reward_model, first.data.train) == ("none", "PRM", None)
    folder = RunFolder(tmp_path / "run")
    folder.open(resolved_yaml(first))
    folder.close()
    folder.check_free(resolved_yaml(compose_run("search", [*MODEL, "search.reward_model=PRM", "search.width=7"])))
