"""One optimizer step of a Megatron policy on a batch that every rank has."""

from __future__ import annotations


def train_step(policy, batch, loss, *, loss_counts: dict[str, float], micro_batching) -> dict[str, float]:
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    from nemo_edo.data.shares import cut
    from nemo_edo.megatron.forward_backward import forward_backward
    from nemo_edo.megatron.packing import input_shapes

    ranks, required = parallel_state.get_data_parallel_world_size(), input_shapes(get_model_config(policy.chunks[0]))
    share = cut(batch, micro_batching, ranks, required, loss_counts)[parallel_state.get_data_parallel_rank()]
    policy.zero_grad()
    metrics, _ = forward_backward(policy, share, loss, exploration_weight=0.0, temperature=1.0)
    return {**metrics, "padding_share": share.padding_share, **policy.apply_gradients(metrics["loss"])}
