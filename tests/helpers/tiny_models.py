"""Tiny Hugging Face models with random weights, Megatron policies made of them, and the dense reference for both."""

from pathlib import Path

import torch
from torch import Tensor

from nemo_edo.builtin_task.model import write_tokenizer
from nemo_edo.config import ArithmeticConfig, LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.types import TrainingBatch

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
VOCAB_SIZE = 130
"""Two more than the tokenizer's 128 tokens, as real models have it."""


def write_tiny_model(folder: Path, model_type: str = "qwen2", *, seed: int = 0, **fields) -> Path:
    """Writes and returns ``folder``. The weights are far from their usual start (biases 0, norms 1, logits near 0),
    so that a weight that is lost or misplaced shows in the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = write_tokenizer(folder, ArithmeticConfig(num_operands=2))
    config = AutoConfig.for_model(
        model_type, **{"vocab_size": VOCAB_SIZE, **SHAPE, **fields}, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def random_batch(rows: int = 5, length: int = 12, seed: int = 0) -> TrainingBatch:
    """Prompts and responses of random lengths; two policies' made-up log-probabilities, some of them far off."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (rows, 1), generator=generator)

    prompts, ends = uniform(1, length // 2), uniform(length // 2 + 1, length + 1)
    ends[0] = length
    positions = torch.arange(1, length)
    mask = ((positions >= prompts) & (positions < ends)).float()
    tokens = torch.randint(2, VOCAB_SIZE, (rows, length), generator=generator)
    old = -4 + torch.randn(rows, length - 1, generator=generator)
    return TrainingBatch(
        tokens=torch.where(torch.arange(length) < ends, tokens, 0),
        mask=mask,
        advantages=torch.randn(rows, generator=generator),
        old_logprobs=old * mask,
        ref_logprobs=(old + 0.5 * torch.randn(old.shape, generator=generator)) * mask,
    )


def with_shared_prompts(batch: TrainingBatch, of: dict[int, int]) -> TrainingBatch:
    """The batch, whose given rows have the prompts of others and their own responses."""
    tokens, mask = batch.tokens.clone(), batch.mask.clone()
    for row, other in of.items():
        begin = int(mask[other].argmax())
        tokens[row, : begin + 1] = tokens[other, : begin + 1]
        end = int(mask[row].nonzero().max())
        mask[row] = ((torch.arange(len(mask[row])) >= begin) & (torch.arange(len(mask[row])) <= end)).float()
    return batch.with_fields(tokens=tokens, mask=mask)


# --- transformers -------------------------------------------------------------------------------------------------


def load_dense(folder: Path, dtype: torch.dtype = torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def dense_logprobs(model, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens[:, 1:] and entropies, each [B, T], differentiable."""
    log_p = torch.log_softmax(model(tokens).logits[:, :-1].float() / temperature, dim=-1)
    return log_p.gather(-1, tokens[:, 1:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def add_dense_adapters(model, adapters: dict[str, Tensor], scale: float) -> None:
    """LoRA by its equation: each named layer's output gains scale * B A x."""
    for name in (name.removesuffix(".lora_A.weight") for name in adapters if name.endswith(".lora_A.weight")):
        a, b = (adapters[f"{name}.lora_{factor}.weight"] for factor in "AB")

        def add(layer, inputs, output, a=a, b=b):
            return output + scale * inputs[0] @ a.T @ b.T

        model.get_submodule(name).register_forward_hook(add)


# --- Megatron: imported only where it is used, for the processes that adapt to their platform in steps --------------


def build_policy(
    folder: Path, parallelism: ParallelismConfig | None = None, dtype: str = "fp32", lora: LoRAConfig | None = None,
    attention: str = "auto",
):
    """A MegatronPolicy over the folder's weights, with fresh process groups."""
    from nemo_edo.megatron.bridge import build_model
    from nemo_edo.megatron.platform import device_and_groups
    from nemo_edo.megatron.policy import MegatronPolicy

    parallelism, precision = parallelism or ParallelismConfig(), PrecisionConfig(dtype)
    device = device_and_groups(parallelism, seed=0, threads=1)
    built = build_model(folder, parallelism, precision, device, lora=lora, attention=attention)
    return MegatronPolicy(built, parallelism, precision, device)


def shares(policy, batch: TrainingBatch, micro_batching, loss_counts: dict | None = None) -> list:
    """Each data-parallel rank's share of a batch."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    from nemo_edo.data.shares import cut
    from nemo_edo.megatron.packing import input_shapes

    ranks, required = parallel_state.get_data_parallel_world_size(), input_shapes(get_model_config(policy.chunks[0]))
    return cut(batch, micro_batching, ranks, required, loss_counts)


def forward_backward(policy, batch: TrainingBatch, loss, *, loss_counts, micro_batching, **settings) -> dict:
    """A pass over a batch that every rank has: the metrics."""
    from megatron.core import parallel_state

    from nemo_edo.megatron.forward_backward import forward_backward

    share = shares(policy, batch, micro_batching, loss_counts)[parallel_state.get_data_parallel_rank()]
    means, _ = forward_backward(policy, share, loss, **{"exploration_weight": 0.0, **settings})
    return {**means, "padding_share": share.padding_share}


def train_step(policy, batch: TrainingBatch, loss, **settings) -> dict[str, float]:
    policy.zero_grad()
    metrics = forward_backward(policy, batch, loss, **settings)
    return {**metrics, **policy.apply_gradients(metrics["loss"])}


def logprobs(policy, batch: TrainingBatch, *, micro_batching, temperature: float) -> Tensor:
    """[2, B, T] log-probabilities and entropies of a batch that every rank has."""
    from megatron.core import parallel_state

    from nemo_edo.megatron.forward_backward import logprobs_and_entropy, on_every_rank

    share = shares(policy, batch, micro_batching)[parallel_state.get_data_parallel_rank()]
    return on_every_rank(share, logprobs_and_entropy(policy, share, temperature), batch.mask.shape)


def over(model):
    """``interfaces.Policy`` over a model class that every rank has built."""
    from nemo_edo.worker.remote import policy_over

    return policy_over(model)


def step(model, batch: TrainingBatch, exploration_weight: float | None = None) -> dict[str, float]:
    """An optimizer step of a model class; exploration_weight: None: the configured one."""
    configured = getattr(model.settings, "exploration_weight", 0.0)
    weight = configured if exploration_weight is None else exploration_weight
    return over(model).train_step(batch, exploration_weight=weight)


def sft_settings(batch: TrainingBatch) -> dict:
    """What ``train_step`` and ``forward_backward`` need for the mean negative log-likelihood of a batch."""
    from nemo_edo.config import MicroBatchConfig
    from nemo_edo.losses import sft_loss

    return {
        "loss": lambda logprobs, entropies, micro, _: ({"sft": sft_loss(logprobs, micro.mask)}, {}),
        "loss_counts": {"sft": float(batch.mask.sum())},
        "micro_batching": MicroBatchConfig(2),
        "temperature": 1.0,
    }


def train_sft(policy, seeds) -> list[dict[str, float]]:
    """The metrics of a step on the random batch of each seed."""
    batches = [random_batch(rows=3, seed=seed) for seed in seeds]
    return [train_step(policy, batch, **sft_settings(batch)) for batch in batches]


def build_engine(policy, **settings):
    """A MegatronEngine over the policy's weights that stops at token 1 and decodes ids as "3 4 5"."""
    from nemo_edo.generation.megatron_engine import MegatronEngine

    def decode(ids) -> str:
        return " ".join(map(str, ids))

    return MegatronEngine(
        policy.built, **{"stop_ids": [1], "max_batch_size": 64, **settings}, decode=decode, device=policy.device
    )


def exported(policy, *, merged: bool = True) -> dict[str, Tensor]:
    """The weights as Hugging Face names them, with or without what adapters add to them."""
    weights = policy.built.bridge.export_hf_weights(
        policy.chunks, cpu=True, show_progress=False, merge_adapter_weights=merged
    )
    return {name.replace(".base_layer.", "."): tensor.detach().clone() for name, tensor in weights}


def exported_adapters(policy) -> dict[str, Tensor]:
    """LoRA's factors as Hugging Face names them ("model.layers.0.mlp.up_proj.lora_A.weight"); layers that are one to
    Megatron share their A."""
    weights = policy.built.bridge.export_adapter_weights(policy.chunks, cpu=True, show_progress=False)
    return {name: tensor.detach().clone() for name, tensor in weights}


def clear_gradients(policy) -> None:
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()


@torch.no_grad()
def exported_gradients(policy) -> dict[str, Tensor]:
    """The gradients as Hugging Face names them: the export only permutes and splits, whatever the numbers mean."""
    if any(chunk.ddp_config.use_distributed_optimizer for chunk in policy.chunks):
        _gather_gradients(policy.chunks)
    trained = [p for chunk in policy.chunks for p in chunk.parameters() if p.requires_grad]
    with policy.weights([parameter.main_grad.clone() for parameter in trained]):
        return exported_adapters(policy) if policy.built.lora else exported(policy)


def _gather_gradients(chunks) -> None:
    """Makes whole what the distributed optimizer leaves a rank: its own part of each bucket."""
    for group in (group for chunk in chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups):
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            own = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=ranks)
