import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.config import ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError
from nemo_edo.megatron.precision import DeviceSupport
from nemo_edo.megatron.splits import check_device, check_splits, check_world

DENSE = SimpleNamespace(
    num_attention_heads=14, num_query_groups=2, num_layers=24, ffn_hidden_size=4864, num_moe_experts=None
)
EXPERTS = SimpleNamespace(
    num_attention_heads=32, num_query_groups=4, num_layers=48, ffn_hidden_size=6144, num_moe_experts=128,
    moe_ffn_hidden_size=768,
)
VOCABULARY = 151_936


@pytest.mark.parametrize(("model", "split", "named"), [
    (DENSE, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 5},
     r"virtual_pipeline_.* 12 layers of a pipeline stage; null, 2, 3, 4, 6, 12 "),
    (DENSE, {"recompute_granularity": "full", "recompute_num_layers": 13, "pipeline_model_parallel_size": 2},
     r"recompute_num_layers 13 .* 12 layers"),
    (EXPERTS, {"expert_tensor_parallel_size": 5}, r"expert_tensor_.* 5 .* 768 units of an expert"),
    (EXPERTS, {"tensor_model_parallel_size": 2}, r"tensor_.* 2 .*parallelism.sequence_parallel"),
])
def test_a_size_that_does_not_divide_the_model_is_an_error_that_says_which_would(model, split, named):
    with pytest.raises(UserError, match=f"parallelism.{named}"):
        check_splits(model, ParallelismConfig(**split), VOCABULARY)


ON_GPUS = [
    ({"context_parallel_size": 2}, "1.0"),
    ({"optimizer_offload_fraction": 0.5, "use_distributed_optimizer": True}, "2.1"),
]


@pytest.mark.parametrize(("split", "engine"), ON_GPUS)
def test_what_only_a_gpu_with_transformer_engine_does_is_refused_elsewhere(split, engine):
    name = next(iter(split))
    bf16 = PrecisionConfig("bf16")
    check_device(ParallelismConfig(**split), bf16, DeviceSupport((9, 0), "12.9", f"{engine}.0+cu12"))
    for machine, here in (
        (DeviceSupport(None, None, None), "there is no GPU"),
        (DeviceSupport((9, 0), "12.9", None), "found none"),
        (DeviceSupport((9, 0), "12.9", "0.13"), "found 0.13"),
    ):
        with pytest.raises(UserError, match=rf"parallelism.{name} .* Engine {engine} or newer \({here}\)"):
            check_device(ParallelismConfig(**split), bf16, machine)
        check_device(ParallelismConfig(), bf16, machine)


SMALL = st.integers(1, 12)
MODELS = st.builds(
    lambda groups, per_group, units, layers, experts: SimpleNamespace(
        num_query_groups=groups, num_attention_heads=groups * per_group, ffn_hidden_size=units, num_layers=layers,
        num_moe_experts=experts, moe_ffn_hidden_size=units,
    ),
    SMALL, SMALL, st.integers(1, 240), st.integers(1, 48), st.one_of(st.none(), st.integers(2, 64)),
)


@st.composite
def splits(draw) -> dict:
    found = {"tensor_model_parallel_size": draw(SMALL), "pipeline_model_parallel_size": draw(SMALL),
             "expert_model_parallel_size": draw(SMALL)}
    if found["pipeline_model_parallel_size"] > 1 and draw(st.booleans()):
        found["virtual_pipeline_model_parallel_size"] = draw(st.integers(2, 6))
    return found | {"sequence_parallel": found["tensor_model_parallel_size"] > 1}


def fits(model, split: dict, vocabulary: int) -> bool:
    """By the meaning of the sizes: every rank has as many whole heads, groups, columns, layers and experts."""
    tensor, expert = split["tensor_model_parallel_size"], split["expert_model_parallel_size"]
    shared = [model.num_attention_heads, model.num_query_groups, vocabulary]
    shared += [model.moe_ffn_hidden_size if model.num_moe_experts else model.ffn_hidden_size]
    chunks = split["pipeline_model_parallel_size"] * split.get("virtual_pipeline_model_parallel_size", 1)
    experts = model.num_moe_experts % expert == 0 if model.num_moe_experts else expert == 1
    return all(whole % tensor == 0 for whole in shared) and model.num_layers % chunks == 0 and experts


def refusal(model, split: dict, vocabulary: int) -> str | None:
    try:
        check_splits(model, ParallelismConfig(**split), vocabulary)
    except UserError as error:
        return str(error)
    return None


@given(MODELS, splits(), st.integers(1, 500))
def test_a_split_is_refused_if_and_only_if_a_size_does_not_divide(model, split, vocabulary):
    assert (refusal(model, split, vocabulary) is None) == fits(model, split, vocabulary)


@given(splits(), st.integers(1, 4), st.integers(1, 64))
def test_a_world_is_refused_if_and_only_if_it_is_not_a_multiple_of_what_is_said(split, context, world):
    parallelism = ParallelismConfig(**split, context_parallel_size=context)
    products = (parallelism.model_ranks, parallelism.expert_ranks)
    try:
        check_world(parallelism, world)
    except UserError as error:
        product = int(re.search(r"needs a multiple of (\d+) processes", str(error))[1])
        assert product in products and world % product
    else:
        assert all(world % product == 0 for product in products)
