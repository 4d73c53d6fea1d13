import pytest

from nemo_edo.config import ParallelismConfig, PrecisionConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sequence_parallel": True}, r"sequence_parallel is True, expected False without tensor_model_parallel_size"),
        ({"virtual_pipeline_model_parallel_size": 2}, r"virtual_pipeline_.* is 2, expected null where pipeline_"),
        (
            {"virtual_pipeline_model_parallel_size": 1, "pipeline_model_parallel_size": 2},
            r"virtual_pipeline_.* is 1, expected null or a number above 1",
        ),
        ({"overlap_param_gather": True}, r"overlap_param_gather is True, expected False without use_distributed_opt"),
        (
            {"overlap_param_gather": True, "use_distributed_optimizer": True},
            r"overlap_param_gather is True, expected False without overlap_grad_reduce",
        ),
        ({"optimizer_offload_fraction": 0.5}, r"optimizer_offload_fraction is 0.5, expected 0.0 without use_distrib"),
        (
            {"optimizer_offload_fraction": 1.5, "use_distributed_optimizer": True},
            r"optimizer_offload_fraction is 1.5, expected a number in \[0, 1\]",
        ),
        ({"context_parallel_size": 0}, r"context_parallel_size is 0, expected a number above 0"),
        ({"recompute_granularity": "some"}, r"recompute_granularity is 'some', expected one of full, selective"),
    ],
)
def test_a_split_that_no_model_allows_is_an_error_that_names_the_key(fields, message):
    with pytest.raises(ValueError, match=f"parallelism.{message}"):
        ParallelismConfig(**fields)


def test_processes_of_one_copy_are_the_product_of_the_splits():
    split = ParallelismConfig(2, 3, context_parallel_size=5)
    assert (split.model_ranks, split.expert_ranks) == (30, 6)
    experts = ParallelismConfig(2, 3, expert_model_parallel_size=7, expert_tensor_parallel_size=1)
    assert (experts.model_ranks, experts.expert_ranks) == (6, 21)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "fp16"}, r"dtype is 'fp16', expected one of fp32, bf16"),
        ({"fp8": "hybrid"}, r"dtype is 'fp32', expected bf16 with precision.fp8 hybrid"),
        ({"fp8": "e5m2", "dtype": "bf16"}, r"fp8 is 'e5m2', expected one of hybrid, e4m3"),
        ({"fp8_param_gather": True}, r"fp8_param_gather is True, expected false where precision.fp8 is null"),
        ({"fp8": "e4m3", "dtype": "bf16", "fp8_recipe": "rowwise"}, r"fp8_recipe is 'rowwise', expected one of tensor"),
        ({"fp8": "e4m3", "dtype": "bf16", "fp8_margin": 1}, r"fp8_margin is 1, expected 0 with fp8_recipe tensorwise"),
        (
            {"fp8": "hybrid", "dtype": "bf16", "fp8_recipe": "delayed", "bf16_layers_at_end": 1},
            r"bf16_layers_at_end is 1, expected 0 with fp8_recipe delayed",
        ),
    ],
)
def test_numbers_that_do_not_go_together_are_an_error_that_names_the_key(fields, message):
    with pytest.raises(ValueError, match=f"precision.{message}"):
        PrecisionConfig(**fields)
