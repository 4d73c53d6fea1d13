"""The memory estimates of split models against the tensors that two processes have."""

import pytest
from helpers.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
SHARDED = {"use_distributed_optimizer": True}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
CASES = [
    ("qwen3", SEQUENCE), ("qwen2, tied", PIPELINE), ("qwen3", SHARDED), ("experts", EXPERT | SHARDED),
    ("experts", EXPERT | SEQUENCE | {"expert_tensor_parallel_size": 1}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "qwen2, tied", tie_word_embeddings=True)
    write_tiny_model(folder / "qwen3", "qwen3")
    write_tiny_model(folder / "experts", "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
                     norm_topk_prob=True)
    return folder


@pytest.mark.parametrize(("model", "sizes"), CASES)
def test_every_rank_has_the_estimated_weights_gradients_and_optimizer_state(two, models, model: str, sizes: dict):
    """Of a sharded optimizer state only the sum: shares differ by the padding of gradient buckets."""
    ranks = two.run("helpers.memory_worker:measured_and_estimated", folder=models / model, sizes=sizes)
    sharded = "use_distributed_optimizer" in sizes
    for rank in ranks:
        for part in ("weights", "gradients", *([] if sharded else ["optimizer"])):
            assert rank["measured"][part] == rank["estimated"][part] > 0, part
    measured, estimated = (sum(rank[side]["optimizer"] for rank in ranks) for side in ("measured", "estimated"))
    assert measured == estimated
