from types import SimpleNamespace

import pytest
import torch

from nemo_edo.config import ParallelismConfig
from nemo_edo.errors import UserError
from nemo_edo.megatron.splits import check_device, check_splits, check_world

DENSE = SimpleNamespace(
    num_attention_heads=14, num_query_groups=2, num_layers=24, ffn_hidden_size=4864, num_moe_experts=None
)
EXPERTS = SimpleNamespace(
    num_attention_heads=32, num_query_groups=4, num_layers=48, ffn_hidden_size=6144, num_moe_experts=128,
    moe_ffn_hidden_size=768,
)
VOCABULARY = 151_936


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"tensor_model_parallel_size": 4}, r"tensor_.* 4 does not divide the model's 14 attention heads; 1, 2, 7, 14"),
        ({"tensor_model_parallel_size": 7}, r"tensor_.* 7 does not divide the model's 2 query groups; 1, 2 would"),
        ({"pipeline_model_parallel_size": 5}, r"pipeline_.* 5 does not divide .* 24 layers; 1, 2, 3, 4, 6, 8, 12"),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 5},
            r"virtual_pipeline_.* 5 does not divide the model's 12 layers of a pipeline stage; 1, 2, 3, 4, 6, 12 would",
        ),
        ({"expert_model_parallel_size": 2}, r"expert_model_parallel_size 2: the model has no experts"),
        (
            {"recompute_granularity": "full", "recompute_num_layers": 13, "pipeline_model_parallel_size": 2},
            r"recompute_num_layers 13 is more than the 12 layers",
        ),
    ],
)
def test_a_size_that_does_not_divide_the_model_is_an_error_that_says_which_would(split, message):
    with pytest.raises(UserError, match=f"parallelism.{message}"):
        check_splits(DENSE, ParallelismConfig(**split), VOCABULARY)


def test_an_odd_vocabulary_cannot_be_split_by_two():
    with pytest.raises(UserError, match="2 does not divide the model's 131 vocabulary entries; 1, 131 would"):
        check_splits(DENSE, ParallelismConfig(2), 131)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"expert_model_parallel_size": 3}, r"expert_model_.* 3 does not divide the model's 128 experts; 1, 2, 4, 8"),
        ({"expert_tensor_parallel_size": 5}, r"expert_tensor_.* 5 does not divide the model's 768 units of an expert"),
        ({"tensor_model_parallel_size": 2}, r"tensor_.* 2 needs parallelism.sequence_parallel in a model with experts"),
    ],
)
def test_experts_have_splits_of_their_own(split, message):
    with pytest.raises(UserError, match=f"parallelism.{message}"):
        check_splits(EXPERTS, ParallelismConfig(**split), VOCABULARY)


def test_the_models_of_the_configs_can_be_split_so():
    check_splits(DENSE, ParallelismConfig(2, 4, virtual_pipeline_model_parallel_size=3), VOCABULARY)
    check_splits(EXPERTS, ParallelismConfig(4, sequence_parallel=True, expert_model_parallel_size=8), VOCABULARY)


def test_a_world_needs_room_for_whole_copies_of_the_model_and_of_the_experts():
    check_world(ParallelismConfig(2, 2, context_parallel_size=2), 16)
    with pytest.raises(UserError, match=r"12 processes .* 2 x .* 2 x context_parallel_size 2: start a multiple of 8"):
        check_world(ParallelismConfig(2, 2, context_parallel_size=2), 12)
    with pytest.raises(UserError, match=r"12 processes cannot be split into expert_model_.* 8: start a multiple of 8"):
        check_world(ParallelismConfig(expert_model_parallel_size=8), 12)


@pytest.mark.parametrize(
    "split",
    [{"context_parallel_size": 2}, {"optimizer_offload_fraction": 0.5, "use_distributed_optimizer": True}],
)
def test_what_only_a_gpu_does_is_refused_elsewhere(split):
    check_device(ParallelismConfig(**split), torch.device("cuda", 0))
    with pytest.raises(UserError, match=f"parallelism.{next(iter(split))} .* needs a GPU"):
        check_device(ParallelismConfig(**split), torch.device("cpu"))
