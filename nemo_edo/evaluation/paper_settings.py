"""Whether a run can stand beside the paper's numbers: each setting of it that the paper gives another value.

Only what the paper gives is compared: model, data, samples, iterations, batches, alphas, and what makes a method that
method. Its beta, clipping, epochs and GRPO's learning rate are not given, so a run may have any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_edo.data.benchmarks import BENCHMARKS
from nemo_edo.evaluation.comparison import START
from nemo_edo.evaluation.paper_tables import (
    EXPERIMENTS,
    LLAMA3,
    LLAMA31_SFT,
    OUT_OF_DISTRIBUTION,
    QWEN,
    QWEN_SFT,
    Experiment,
    evaluated_on,
)
from nemo_edo.evaluation.run_record import RunRecord, setting
from nemo_edo.evaluation.run_set import arm_settings, flattened

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
_QWEN = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
_SHAPES = {
    LLAMA3: {**_LLAMA, "rope_scaling.factor": None},
    LLAMA31_SFT: {**_LLAMA, "rope_scaling.factor": 8.0},
    QWEN: _QWEN,
    QWEN_SFT: _QWEN,
}
"""Sizes by which the backbones' architectures are told; that of Llama 3.1 is Llama 3's with scaled positions."""
_TRAINED_ON = {"GSM8K": "gsm8k", "MATH": "math", "s1K": "s1k"}
_TESTED_ON = {"GSM8K": "GSM8K", "MATH": "MATH", "s1K": "s1K_eval"}
_SAMPLING = {"samples_per_prompt": 10, "temperature": 1.0, "top_p": 1.0}
_EPOCH = {"s1K": 1000}
"""Solutions of the warm-up, which sees each once."""
_LOOP = {
    "iterations": 3,
    "problems_per_iteration": None,
    "log_ratio_floor": None,
    "schedule.kind": "constant",
}
_GRPO = {
    "algorithm": "grpo",
    "entropy_coefficient": 0.0,
    "exploration_control": "none",
    "covariance_control": "none",
    "importance_sampling_level": "token",
    "pass_k": None,
    "novelty_strength": 0.0,
    "redundancy_weighted": False,
    "explore_uninformative_groups": True,
    "aggregation": "seq-mean-token-mean",
    "dynamic_sampling": False,
}
_IDPO = {"algorithm": "idpo", "preference_loss": "sigmoid", "length_normalized": False, "exploration_samples": "all"}
_DAPO = {
    **_GRPO,
    "alpha": 0.0,
    "beta": 0.0,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "aggregation": "token-mean",
    "dynamic_sampling": True,
}
_METHODS = {
    "grpo": {**_GRPO, "alpha": 0.0},
    "ed-grpo": {**_GRPO, "alpha": 1e-3},
    "dapo": _DAPO,
    "eto": {**_IDPO, "alpha": 0.0},
    "ed-idpo": {**_IDPO, "alpha": 1e-3},
}
NO_EXPERIMENT = "its experiment is none of the paper's"


def departures(record: RunRecord, arm: str) -> list[str]:
    """What keeps an arm of a run from standing beside the paper's numbers, in words; none: nothing that is known of."""
    experiment = EXPERIMENTS.get(record.config.get("experiment"))
    if experiment is None:
        return [NO_EXPERIMENT]
    if arm not in experiment.methods:
        return [f"the paper has no {arm} beside this experiment's other arms"]
    architecture = setting(record, "model.architecture")
    if architecture is None:
        model = ["model.architecture is null, so the run does not say which model it is of"]
    else:
        model = _differences(_SHAPES[experiment.backbone], flattened(architecture), "model.architecture.")
    return [
        *model,
        *_of_the_data(record, experiment),
        *(_differences(_SAMPLING, setting(record, "sampling"), "sampling.") if not experiment.elsewhere else ()),
        *(_of_the_training(record, arm, experiment) if not experiment.elsewhere else ()),
    ]


def method_settings(method: str) -> dict[str, Any]:
    """What makes an arm the paper's method of that name: its settings by dotted key."""
    family, _, alpha = method.partition(" alpha=")
    return {**_LOOP, **_METHODS[family], **({"alpha": float(alpha)} if alpha else {})}


def _of_the_data(record: RunRecord, experiment: Experiment) -> Iterator[str]:
    data = setting(record, "data")
    if not experiment.elsewhere:
        yield from _differences({"benchmark": _TRAINED_ON[experiment.trained_on]}, data, "data.")
    tested = data.get("test_benchmark") or data.get("benchmark")
    expected = OUT_OF_DISTRIBUTION if experiment.elsewhere else (_TESTED_ON[experiment.trained_on],)
    if evaluated_on(tested, experiment.trained_on) not in expected:
        yield f"it is evaluated on {tested or 'problems of its own'}, the paper's on {' or '.join(expected)}"
    prompts = BENCHMARKS[_TRAINED_ON[experiment.trained_on]].answers
    yield from _differences({"answer_format": prompts, "check_rows": True}, data, "data.")


def _of_the_training(record: RunRecord, arm: str, experiment: Experiment) -> Iterator[str]:
    sft = setting(record, "sft")
    if experiment.warmed_up:
        rows, seen = _EPOCH[experiment.trained_on], sft["steps"] * sft["batch_size"]
        if not rows <= seen < rows + sft["batch_size"]:
            yield f"its warm-up sees {seen} solutions, the paper's {rows}"
        yield from _differences({"lr": 1e-5}, sft["optimizer"], "sft.optimizer.")
    else:
        yield from _differences({"steps": 0}, sft, "sft.")
    yield from _differences({"rank": experiment.lora_rank}, setting(record, "lora"), "lora.")
    if arm != START:
        expected = {**method_settings(experiment.methods[arm]), "minibatch_size": experiment.batch}
        if experiment.lr is not None:
            expected["optimizer.lr"] = experiment.lr
        yield from _differences(expected, arm_settings(record, arm), "")


def _differences(expected: Mapping[str, Any], found: Mapping[str, Any], prefix: str) -> list[str]:
    """Absent settings are None: of a model's architecture, what it does not have."""
    return [
        f"{prefix}{key} is {_word(found.get(key))}, the paper's {_word(value)}"
        for key, value in expected.items()
        if found.get(key) != value
    ]


def _word(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
