"""Settings of evaluations without training, and of the judge."""

from __future__ import annotations

import pytest

from nemo_edo.configuration import ConfigError, arm_configs, compose_run, resolved_yaml

MODEL = ["model.path=DIR", "data.test=FILE"]
JUDGE = ["rewards.verifier=judge", "rewards.judge.url=http://node7:8000/v1", "rewards.judge.model=m"]


def test_a_model_is_evaluated_from_a_test_file_alone():
    cfg = compose_run("evaluate", MODEL)
    assert (cfg.algorithm, cfg.sft.steps, arm_configs(cfg)) == ("none", 0, {})
    assert cfg.data.train is None and not cfg.data.is_built_in


@pytest.mark.parametrize("benchmark", ["gsm8k", "math", "math500", "aime24", "minerva", "olympiadbench", "s1k"])
def test_every_benchmark_can_be_chosen_without_training_data(benchmark: str):
    assert compose_run("evaluate", [*MODEL, f"data={benchmark}"]).data.test == "FILE"


def test_the_resolved_config_composes_to_the_same(tmp_path):
    cfg = compose_run("evaluate", [*MODEL, *JUDGE, "generation=vllm"])
    (tmp_path / "config.yaml").write_text(resolved_yaml(cfg))
    assert compose_run("config", [], tmp_path) == cfg


@pytest.mark.parametrize(("overrides", "message"), [
    ([*MODEL, "sft.steps=3"], "sft.steps is 3, expected 0 with algorithm none: nothing is trained"),
    ([*MODEL, "arms.a.alpha=1"], r"arms is \['a'\], expected none with algorithm none"),
    ([*MODEL, "algorithm=nothing"], "algorithm is 'nothing', expected one of none, sft, grpo, idpo"),
    ([*MODEL, "algorithm=grpo"], "data.train and data.test: give both, or neither for the built-in task"),
    ([*MODEL, "generation=vllm", "generation.placement=shared"], "generation.placement is 'shared', expected apart"),
    (["model.path=DIR", "data.test=null", "data.train=FILE"], "data.train and data.test: give both"),
    ([*MODEL, "evaluation.aggregation=best"], "evaluation.aggregation is 'best', expected one of last, min, product"),
    ([*MODEL, "rewards.verifier=judge"], "rewards.judge.url is None, expected a value with rewards.verifier judge"),
    ([*MODEL, *JUDGE, "rewards.judge.model=null"], "rewards.judge.model is None, expected a value"),
    ([*MODEL, *JUDGE, "rewards.judge.url=node7"], "rewards.judge.url is 'node7', expected a URL such as"),
    ([*MODEL, *JUDGE, "rewards.judge.prompt='{question} {answer}'"], "expected a text with {reference}, and with"),
    ([*MODEL, *JUDGE, "rewards.judge.prompt='{reference}'"], "expected a text with {reference}, and with {answer} or"),
    ([*MODEL, *JUDGE, "rewards.judge.max_abstained=1.5"], "rewards.judge.max_abstained is 1.5, expected a number in"),
    ([*MODEL, *JUDGE, "rewards.judge.attempts=0"], "rewards.judge.attempts is 0, expected a number above 0"),
    ([*MODEL, *JUDGE, "rewards.judge.temperature=-1"], "rewards.judge.temperature is -1.0, expected a number of at"),
    ([*MODEL, *JUDGE, "rewards.judge.prompt_price=1"], "rewards.judge.prompt_price and .*completion_price: give both"),
    ([*MODEL, *JUDGE, "rewards.judge.structured_output=json"], "expected one of none, choice, json_schema"),
    ([*MODEL, *JUDGE, "rewards.judge.key=abc"], "unknown key rewards.judge.key"),
])  # fmt: skip
def test_what_does_not_fit_is_an_error(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        compose_run("evaluate", overrides)


def test_a_judge_needs_nothing_where_it_is_not_asked():
    assert compose_run("quickstart", []).rewards.judge.url is None
