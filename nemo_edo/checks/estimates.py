"""How much memory a training run takes on each GPU, from sizes alone.

Weights, gradients and the optimizer's state are counts of numbers, exact but for padding of a few kB. Activations are
the tensors that the backward pass keeps, counted layer by layer as in Korthikanti et al. (2022), "Reducing Activation
Recomputation in Large Transformer Models", for RMS norms, gated MLPs, grouped queries and an attention that keeps no
matrix of scores, in fused kernels. They are an upper bound: every sequence of a micro-batch is taken to be
model.seq_length long. What no formula gives is an assumption, and named as one below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from nemo_edo.config import LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.config.model_shape import ModelShape
from nemo_edo.generation.batch_size import FP32, decoding_bytes

OVERHEAD = int(3e9)
"""Assumed: CUDA's context, the workspaces of cuBLAS and Transformer Engine, NCCL's buffers."""
CPU_OVERHEAD = int(1e9)
"""Assumed where the device is a CPU: Python with its libraries, of which 0.73 to 0.86 GB were measured."""
FRAGMENTATION = 0.05
"""Assumed: share of what is allocated that PyTorch's allocator cannot use."""
LOSS_BLOCK, CPU_LOSS_BLOCK = 2**26, 2**22
"""Logits that the fused loss layer makes at a time (``parallel.linear.BLOCK_ELEMENTS``)."""


@dataclass(frozen=True)
class Workload:
    """What is trained, how it is split, and how much of it is in memory at a time."""

    shape: ModelShape
    parallelism: ParallelismConfig
    precision: PrecisionConfig
    lora: LoRAConfig
    data_parallel: int
    tokens: int
    """Tokens of a micro-batch, padding included."""
    copies: float | None = None
    """Mean copies of a token in attention, where sequences share prompts; None: they share none."""
    reference: str = "none"
    """Where the reference's copy of the weights is: none, host or resident."""
    fused_loss: bool = False
    """Whether the loss layer makes its logits a block at a time."""
    generation_rows: int = 0
    """Sequences that are decoded at a time on one data-parallel rank, in the trainer's own process."""
    cached_positions: int = 0
    """Tokens of these sequences whose keys and values are kept, prompts and responses together."""
    cpu: bool = False
    """Whether the device is a CPU: then its memory is the host's."""
    trains: bool = True
    """False: the policy only generates responses."""

    @property
    def bytes_per_number(self) -> int:
        """Bytes of one weight or activation."""
        return 2 if self.precision.dtype == "bf16" else FP32

    @property
    def layers(self) -> int:
        """Layers of one pipeline stage."""
        return self.shape.num_layers // self.stages

    @property
    def stages(self) -> int:
        return self.parallelism.pipeline_model_parallel_size

    @property
    def chunks(self) -> int:
        """Groups of layers on one stage that micro-batches pass at different times."""
        return self.parallelism.virtual_pipeline_model_parallel_size or 1

    @property
    def expert_tensor(self) -> int:
        """Processes that share an expert."""
        return self.parallelism.expert_tensor_parallel_size or self.parallelism.tensor_model_parallel_size


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    """What the backward pass needs, of all micro-batches in flight."""
    loss_layer: int
    generation: int
    """The key-value cache and the logits of the tokens to choose, while no activations are kept."""
    overhead: int
    """The two assumptions."""

    @property
    def total(self) -> int:
        """The peak: in training or in generation, whichever needs more."""
        return self.always + max(self.activations + self.loss_layer, self.generation) + self.overhead

    @property
    def generating(self) -> int:
        """The peak in generation."""
        return self.always + self.generation + self.overhead

    @property
    def always(self) -> int:
        """Needed in training and in generation."""
        return self.weights + self.gradients + self.optimizer + self.reference

    def items(self) -> Iterator[tuple[str, int]]:
        """Each part by its name."""
        return ((field.name.replace("_", " "), getattr(self, field.name)) for field in fields(self))


def stage_memory(load: Workload, stage: int) -> Memory:
    """Memory of a GPU on pipeline stage ``stage``, counted from 0; its tensor- and data-parallel neighbours are
    alike."""
    memory = Memory(
        weights=weight_bytes(load, stage),
        gradients=FP32 * trained_parameters(load, stage),  # Megatron's main gradients are fp32 in every precision
        optimizer=optimizer_bytes(load, stage),
        reference=reference_bytes(load, stage),
        activations=activation_bytes(load, stage),
        loss_layer=loss_layer_bytes(load, stage),
        generation=generation_bytes(load, stage),
        overhead=0,
    )
    if not load.trains:
        memory = replace(memory, gradients=0, optimizer=0, activations=0, loss_layer=0)
    overhead = CPU_OVERHEAD if load.cpu else OVERHEAD
    return replace(memory, overhead=overhead + round(FRAGMENTATION * memory.total))


def all_stages(load: Workload) -> list[Memory]:
    """Memory of a GPU of each pipeline stage."""
    return [stage_memory(load, stage) for stage in range(load.stages)]


# --- weights, gradients, optimizer ----------------------------------------------------------------------------------


def parameters(load: Workload, stage: int) -> int:
    """Weights on one GPU, without adapters."""
    shape, tensor = load.shape, load.parallelism.tensor_model_parallel_size
    layer = _matrices(load) + _experts(load) + shape.layer_biases // tensor + shape.layer_norms + shape.layer_router
    first, last = stage == 0, stage == load.stages - 1
    output = last and not (shape.tied and first)  # a tied one is a separate copy on another stage
    embeddings = shape.embedding_parameters // tensor * (first + output)
    return load.layers * layer + embeddings + shape.hidden_size * last


def adapter_parameters(load: Workload) -> int:
    """Adapter weights on one GPU: both factors are split over the tensor-parallel ranks."""
    if not load.lora.rank:
        return 0
    sizes = [load.shape.layer_matrices[target] for target in set(load.lora.targets)]
    per_layer = sum(load.lora.rank * (outputs + inputs) for outputs, inputs in sizes)
    return load.layers * per_layer // load.parallelism.tensor_model_parallel_size


def trained_parameters(load: Workload, stage: int) -> int:
    """Weights with a gradient on one GPU."""
    return adapter_parameters(load) if load.lora.rank else parameters(load, stage)


def weight_bytes(load: Workload, stage: int) -> int:
    """With FP8, the layers' matrices twice, as rows and as columns, which the two passes read (the transposed copy is
    Hopper's; later GPUs need less)."""
    weights = load.bytes_per_number * (parameters(load, stage) + adapter_parameters(load))
    in_fp8 = load.layers * (_matrices(load) + _experts(load)) if load.precision.fp8 else 0
    return weights + 2 * in_fp8 - (load.bytes_per_number * in_fp8 if load.precision.fp8_param_gather else 0)


def optimizer_bytes(load: Workload, stage: int) -> int:
    """Adam's two moments and, with bf16, the fp32 weights; the distributed optimizer splits them over the ranks that
    have the same weights."""
    splits, trained = load.parallelism, trained_parameters(load, stage)
    if splits.use_distributed_optimizer:
        experts = 0 if load.lora.rank else load.layers * _experts(load)
        ranks = load.data_parallel * splits.context_parallel_size
        same_experts = load.data_parallel * splits.model_ranks // splits.expert_ranks
        trained = math.ceil((trained - experts) / ranks) + math.ceil(experts / same_experts)
    copies = 3 if load.precision.dtype == "bf16" else 2
    return round(copies * FP32 * trained * (1 - splits.optimizer_offload_fraction))


def reference_bytes(load: Workload, stage: int) -> int:
    """Bytes on the device. A copy in host memory is swapped with the weights one parameter at a time: room for the
    largest. On a CPU both copies are in one memory."""
    if load.reference == "none":
        return 0
    if load.reference == "resident" or load.cpu:
        return load.bytes_per_number * trained_parameters(load, stage)
    shape, tensor = load.shape, load.parallelism.tensor_model_parallel_size
    sizes = [outputs * inputs // tensor for outputs, inputs in shape.layer_matrices.values()]
    sizes += [outputs * inputs // load.expert_tensor for outputs, inputs in shape.expert_matrices.values()]
    if stage in (0, load.stages - 1):
        sizes.append(shape.embedding_parameters // tensor)
    return load.bytes_per_number * max(sizes)


def host_bytes(load: Workload, stage: int) -> int:
    """Host memory for each GPU: the reference and the optimizer's offloaded state. None in addition to a CPU's."""
    if load.cpu:
        return 0
    reference = load.bytes_per_number * trained_parameters(load, stage) if load.reference == "host" else 0
    if not load.trains:
        return reference
    resident = replace(load.parallelism, optimizer_offload_fraction=0.0)
    return reference + optimizer_bytes(replace(load, parallelism=resident), stage) - optimizer_bytes(load, stage)


def _matrices(load: Workload) -> int:
    """Weights of a layer's matrices on one GPU."""
    whole = sum(outputs * inputs for outputs, inputs in load.shape.layer_matrices.values())
    return whole // load.parallelism.tensor_model_parallel_size


def _experts(load: Workload) -> int:
    """Weights of a layer's experts on one GPU."""
    return load.shape.layer_experts // (load.parallelism.expert_model_parallel_size * load.expert_tensor)


# --- activations ----------------------------------------------------------------------------------------------------


def activation_bytes(load: Workload, stage: int) -> int:
    """What the backward pass keeps of all micro-batches in flight, and the gradients of one layer's; where
    layers are recomputed in groups, all of the group's own."""
    splits, later = load.parallelism, load.stages - 1 - stage
    # Forward passes of a chunk that wait for their backward pass, at most: those of Megatron's warm-up, and one.
    in_flight = later + 1 if load.chunks == 1 else 2 * later + (load.chunks - 1) * load.stages + 1
    recomputed = 0
    if splits.recompute_granularity == "full":
        recomputed = splits.recompute_num_layers if splits.recompute_method == "uniform" else 1
    return in_flight * kept_of_layers(load) // load.chunks + (recomputed + 1) * layer_activation_bytes(load)


def layer_activation_bytes(load: Workload) -> int:
    """Activations of one layer and one micro-batch, without recomputation."""
    shape, tokens = load.shape, load.tokens // load.parallelism.context_parallel_size
    tensor = load.parallelism.tensor_model_parallel_size
    # Both norms' inputs and outputs. Without sequence parallelism every tensor-parallel rank has them whole.
    numbers = 4 * shape.hidden_size / (tensor if load.parallelism.sequence_parallel else 1)
    # The projection's output, of which values are a view; queries and keys with their rotation; the attention's output.
    attention = 3 * shape.query_width + 3 * shape.key_width
    if load.copies is not None:  # queries, keys, values and results of whole sequences, and the pack's results
        attention = load.copies * 2 * (shape.query_width + shape.key_width) + shape.query_width
    attention += shape.query_width + shape.key_width if shape.qk_norm else 0  # the inputs of their own norms
    mlp = 0 if shape.num_moe_experts else 3 * shape.ffn_hidden_size  # gate and up projections, and their product
    numbers += (attention + mlp) / tensor
    # Tokens are taken to be split evenly over the experts: a copy for each of a token's experts, with the projections
    # and their weighted product. Ranks that share an expert gather their rows.
    rows = shape.moe_router_topk * load.expert_tensor / tensor
    numbers += rows * (shape.hidden_size + 3 * shape.moe_ffn_hidden_size / load.expert_tensor)
    log_sum_exp = FP32 * (load.copies or 1) * shape.num_attention_heads / tensor  # of the attention's softmax
    return round(tokens * (load.bytes_per_number * numbers + log_sum_exp))


def kept_of_layers(load: Workload) -> int:
    """Activations of a stage's layers and one micro-batch, with recomputation: of recomputed layers, the input of each
    group."""
    splits = load.parallelism
    if splits.recompute_granularity != "full":  # selective: the fused attention keeps nothing more to recompute
        return load.layers * layer_activation_bytes(load)
    shares = splits.tensor_model_parallel_size if splits.sequence_parallel else 1
    tokens = load.tokens // splits.context_parallel_size
    layer_input = load.bytes_per_number * tokens * load.shape.hidden_size // shares
    group = splits.recompute_num_layers
    if splits.recompute_method == "uniform":
        return math.ceil(load.layers / group) * layer_input
    recomputed = min(group * load.chunks, load.layers)
    return recomputed * layer_input + (load.layers - recomputed) * layer_activation_bytes(load)


def loss_layer_bytes(load: Workload, stage: int) -> int:
    """Bytes on the last stage: logits and their gradients; Megatron makes fp32 ones of bf16 ones, which are kept as
    well. Fused: a block of logits, and the hidden states and the gradients of these (fp32) and of the output
    weights."""
    if stage != load.stages - 1:
        return 0
    tokens = load.tokens // load.parallelism.context_parallel_size
    columns = load.shape.vocab_size // load.parallelism.tensor_model_parallel_size
    if load.fused_loss:
        hidden = tokens * load.shape.hidden_size * (load.bytes_per_number + FP32)
        weights = columns * load.shape.hidden_size * load.bytes_per_number
        block = CPU_LOSS_BLOCK if load.cpu else LOSS_BLOCK
        return load.bytes_per_number * min(block, tokens * columns) + hidden + weights
    types = (load.bytes_per_number, FP32) if load.bytes_per_number < FP32 else (FP32,)
    return 2 * sum(types) * tokens * columns


def generation_bytes(load: Workload, stage: int) -> int:
    """What decoding in the trainer's process keeps; the logits are the last stage's."""
    if not load.generation_rows:
        return 0
    number = FP32 if load.cpu else load.bytes_per_number
    layer = 2 * load.cached_positions * load.shape.key_width // load.parallelism.tensor_model_parallel_size * number
    logits = load.generation_rows * load.shape.vocab_size if stage == load.stages - 1 else 0
    return decoding_bytes(cache=load.layers * layer, layer=layer, logits=logits)
