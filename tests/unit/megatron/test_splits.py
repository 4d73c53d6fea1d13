"""Which splits model, world and machine allow; and a machine without CUDA is adapted: what asks for it gets the CPU."""

from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from nemo_edo.config import ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError
from nemo_edo.megatron import platform
from nemo_edo.megatron.layer_spec import check_tensor_parallel
from nemo_edo.megatron.splits import check_context_parallel, check_device, check_splits, check_world

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
    (DENSE, {"tensor_model_parallel_size": 4}, r"tensor_.* 4 .* 14 attention heads and 2 query groups; 1, 2 would"),
    (DENSE, {"tensor_model_parallel_size": 7}, r"tensor_.* 2 query groups and 151936 vocabulary"),
    (DENSE, {"pipeline_model_parallel_size": 5}, r"pipeline_.* 24 layers; 1, 2, 3, 4, 6, 8, 12, 24 would"),
    (DENSE, {"expert_model_parallel_size": 2}, r"expert_.* 2: the model has no experts"),
    (EXPERTS, {"expert_model_parallel_size": 3}, r"expert_.* 3 .* 128 experts"),
    (EXPERTS, {"expert_tensor_parallel_size": 5}, r"expert_tensor_.* 5 .* 768 units of an expert"),
    (EXPERTS, {"tensor_model_parallel_size": 2}, r"tensor_.* 2 .*parallelism.sequence_parallel"),
])
def test_a_size_that_does_not_divide_the_model_is_an_error_that_says_which_would(model, split, named):
    check_splits(model, ParallelismConfig(), VOCABULARY)
    with pytest.raises(UserError, match=f"parallelism.{named}"):
        check_splits(model, ParallelismConfig(**split), VOCABULARY)


@pytest.mark.parametrize(("split", "engine"), [
    ({"context_parallel_size": 2}, "1.0"),
    ({"optimizer_offload_fraction": 0.5, "use_distributed_optimizer": True}, "2.1"),
])
def test_what_only_a_gpu_with_transformer_engine_does_is_refused_elsewhere(split, engine):
    name = next(iter(split))
    bf16 = PrecisionConfig("bf16")
    check_device(ParallelismConfig(**split), bf16, Version(f"{engine}.0+cu12"))
    for found, here in ((None, "there is no GPU"), (Version("0.13"), "found 0.13")):
        with pytest.raises(UserError, match=rf"parallelism.{name} .* Engine {engine} or newer \({here}\)"):
            check_device(ParallelismConfig(**split), bf16, found)
        check_device(ParallelismConfig(), bf16, found)


@pytest.mark.parametrize(("split", "world", "product"), [
    ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "context_parallel_size": 2}, 24, 12),
    ({"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 4}, 8, 8),
    ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 4}, 4, 4),
])
def test_a_world_is_refused_unless_it_is_a_multiple_of_what_is_said(split, world, product):
    check_world(ParallelismConfig(**split), world)
    with pytest.raises(UserError, match=rf"needs a multiple of {product} processes, got {world - 2}:"):
        check_world(ParallelismConfig(**split), world - 2)


@pytest.mark.parametrize(("visible", "chosen"), [(8, 3), (4, 3), (1, 0)])  # 1: as where Slurm shows a task its own
def test_a_nodes_fourth_process_takes_its_gpu(monkeypatch, visible, chosen):
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    assert platform.local_gpu(3) == torch.device("cuda", chosen)


def test_cuda_means_the_cpu_and_a_block_that_names_a_device_still_does():
    assert platform.enter(1) == torch.device("cpu")
    plain = torch.ones(2)
    asked = [torch.zeros(2, device="cuda"), torch.tensor(2.0, device="cuda:0"), torch.empty(2, device="meta"), plain]
    assert [one.device.type for one in asked] == ["cpu", "cpu", "meta", "cpu"]
    with torch.device("meta"):
        within = [torch.zeros(2), torch.tensor(2.0), torch.empty_like(torch.ones(2)), torch.ones(2, device="cpu")]
    assert [one.device.type for one in within] == ["meta", "meta", "meta", "cpu"]
    assert plain.cuda() is plain and plain.type() == "torch.cuda.FloatTensor"


@pytest.mark.parametrize(("family", "told"), [
    ("minimax_m2", "norms over all heads, which ranks do not share; set it to 1"), ("olmoe", "set it to 1"),
    ("gemma4", "norms of queries and keys"),
    ("qwen3_next", "needs parallelism.sequence_parallel")])
def test_families_whose_ranks_would_each_have_a_part_of_a_gradient_are_refused(family: str, told: str):
    dense, moe = (SimpleNamespace(num_moe_experts=experts) for experts in (None, 8))
    check_tensor_parallel(family, dense, ParallelismConfig())
    check_tensor_parallel("llama", dense, ParallelismConfig(tensor_model_parallel_size=2))
    check_tensor_parallel("gemma4", moe, ParallelismConfig(tensor_model_parallel_size=2))
    with pytest.raises(UserError, match=f"tensor_model_parallel_size 2.*{told}"):
        check_tensor_parallel(family, dense, ParallelismConfig(tensor_model_parallel_size=2))


@pytest.mark.parametrize(("model", "named"), [
    ({"cp_comm_type": None}, "sliding windows"),
    ({"softmax_type": "learnable"}, "sinks"),
])
def test_attention_that_ranks_cannot_share_is_an_error(model, named):
    shared = ParallelismConfig(context_parallel_size=2)
    windows = {"softmax_type": "vanilla", "window_size": (127, 0), "cp_comm_type": "a2a"}
    check_context_parallel(SimpleNamespace(**windows), shared)
    model = SimpleNamespace(**windows | model)
    check_context_parallel(model, ParallelismConfig())
    with pytest.raises(UserError, match=f"context_parallel_size 2: .* {named}"):
        check_context_parallel(model, shared)
