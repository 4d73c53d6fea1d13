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
    host: int
    """In the host's memory, for each GPU: the reference and the optimizer's offloaded state. None in addition to a
    CPU's."""

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
        """Each part on the GPU by its name."""
        names = [field.name for field in fields(self) if field.name != "host"]
        return ((name.replace("_", " "), getattr(self, name)) for name in names)


def stage_memory(load: Workload, stage: int) -> Memory:
    """Memory of a GPU on pipeline stage ``stage``, counted from 0; its tensor- and data-parallel neighbours are
    alike."""
    shape, splits, number = load.shape, load.parallelism, load.bytes_per_number
    tensor, first, last = splits.tensor_model_parallel_size, stage == 0, stage == load.stages - 1

    # Weights on one GPU. A tied output layer is a separate copy where it is on another stage than the embedding.
    matrices = load.layers * (sum(outputs * inputs for outputs, inputs in shape.layer_matrices.values()) // tensor)
    experts = load.layers * (shape.layer_experts // (splits.expert_model_parallel_size * load.expert_tensor))
    rest = load.layers * (shape.layer_biases // tensor + shape.layer_norms + shape.layer_router)
    embedding = shape.embedding_parameters // tensor
    embeddings = embedding * (first + (last and not (shape.tied and first)))
    parameters = matrices + experts + rest + embeddings + shape.hidden_size * last
    adapted = [shape.layer_matrices[target] for target in set(load.lora.targets)] if load.lora.rank else []
    # Both factors are split over the tensor-parallel ranks.
    adapters = load.layers * sum(load.lora.rank * (outputs + inputs) for outputs, inputs in adapted) // tensor
    trained = adapters if load.lora.rank else parameters
    # With FP8, the layers' matrices twice, as rows and as columns, which the two passes read (the transposed copy is
    # Hopper's; later GPUs need less).
    in_fp8 = matrices + experts if load.precision.fp8 else 0
    weights = number * (parameters + adapters) + 2 * in_fp8
    weights -= number * in_fp8 if load.precision.fp8_param_gather else 0

    # Adam's two moments and, with bf16, the fp32 weights; the distributed optimizer splits them over the ranks that
    # have the same weights.
    stepped = trained
    if splits.use_distributed_optimizer:
        of_experts = 0 if load.lora.rank else experts
        same = load.data_parallel * splits.context_parallel_size
        same_experts = load.data_parallel * splits.model_ranks // splits.expert_ranks
        stepped = math.ceil((trained - of_experts) / same) + math.ceil(of_experts / same_experts)
    state = (3 if load.precision.dtype == "bf16" else 2) * FP32 * stepped
    optimizer = round(state * (1 - splits.optimizer_offload_fraction))

    # A reference in host memory is swapped with the weights one parameter at a time: room for the largest. On a CPU
    # both copies are in one memory.
    reference, in_host = 0, load.reference == "host" and not load.cpu
    if in_host:
        sizes = [outputs * inputs // tensor for outputs, inputs in shape.layer_matrices.values()]
        sizes += [outputs * inputs // load.expert_tensor for outputs, inputs in shape.expert_matrices.values()]
        reference = number * max([*sizes, embedding] if first or last else sizes)
    elif load.reference != "none":
        reference = number * trained

    # What decoding in the trainer's process keeps; the logits are the last stage's.
    generation = 0
    if load.generation_rows:
        cached = FP32 if load.cpu else number
        layer = 2 * load.cached_positions * shape.key_width // tensor * cached
        logits = load.generation_rows * shape.vocab_size if last else 0
        generation = decoding_bytes(cache=load.layers * layer, layer=layer, logits=logits)

    offloaded = state - optimizer if load.trains and not load.cpu else 0
    memory = Memory(
        weights=weights,
        gradients=FP32 * trained if load.trains else 0,  # Megatron's main gradients are fp32 in every precision
        optimizer=optimizer if load.trains else 0,
        reference=reference,
        activations=activation_bytes(load, stage) if load.trains else 0,
        loss_layer=loss_layer_bytes(load) if load.trains and last else 0,
        generation=generation,
        overhead=0,
        host=offloaded + (number * trained if in_host else 0),
    )
    overhead = CPU_OVERHEAD if load.cpu else OVERHEAD
    return replace(memory, overhead=overhead + round(FRAGMENTATION * memory.total))


def all_stages(load: Workload) -> list[Memory]:
    """Memory of a GPU of each pipeline stage."""
    return [stage_memory(load, stage) for stage in range(load.stages)]


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
    if splits.recompute_granularity != "full":
        return load.layers * (layer_activation_bytes(load) - _recomputed_bytes(load))
    shares = splits.tensor_model_parallel_size if splits.sequence_parallel else 1
    tokens = load.tokens // splits.context_parallel_size
    layer_input = load.bytes_per_number * tokens * load.shape.hidden_size // shares
    group = splits.recompute_num_layers
    if splits.recompute_method == "uniform":
        return math.ceil(load.layers / group) * layer_input
    recomputed = min(group * load.chunks, load.layers)
    return recomputed * layer_input + (load.layers - recomputed) * layer_activation_bytes(load)


def _recomputed_bytes(load: Workload) -> int:
    """Activations of a layer that selective recomputation does not keep. The fused attention's core keeps none."""
    splits, shape = load.parallelism, load.shape
    if splits.recompute_granularity != "selective":
        return 0
    tensor, numbers = splits.tensor_model_parallel_size, 0.0
    if "mlp" in splits.recompute_modules and not shape.num_moe_experts:
        numbers += 3 * shape.ffn_hidden_size / tensor
    if "moe" in splits.recompute_modules and shape.num_moe_experts:
        rows = shape.moe_router_topk * load.expert_tensor / tensor
        numbers += rows * (shape.hidden_size + 3 * shape.moe_ffn_hidden_size / load.expert_tensor)
    if "layernorm" in splits.recompute_modules:
        numbers += 2 * shape.hidden_size / (tensor if splits.sequence_parallel else 1)
    return round(load.tokens // splits.context_parallel_size * load.bytes_per_number * numbers)


def loss_layer_bytes(load: Workload) -> int:
    """Bytes on the last stage: logits and their gradients; Megatron makes fp32 ones of bf16 ones, which are kept as
    well. Fused: a block of logits, and the hidden states and the gradients of these (fp32) and of the output
    weights."""
    tokens = load.tokens // load.parallelism.context_parallel_size
    columns = load.shape.vocab_size // load.parallelism.tensor_model_parallel_size
    if load.fused_loss:
        hidden = tokens * load.shape.hidden_size * (load.bytes_per_number + FP32)
        weights = columns * load.shape.hidden_size * load.bytes_per_number
        block = CPU_LOSS_BLOCK if load.cpu else LOSS_BLOCK
        return load.bytes_per_number * min(block, tokens * columns) + hidden + weights
    types = (load.bytes_per_number, FP32) if load.bytes_per_number < FP32 else (FP32,)
    return 2 * sum(types) * tokens * columns
