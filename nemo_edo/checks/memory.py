"""How much memory a run takes on each GPU, from its config and sizes alone; and whether its splits are possible.

Weights, gradients and the optimizer's state are counts of numbers, exact but for padding of a few kB. Activations are
the tensors that the backward pass keeps, counted layer by layer as in Korthikanti et al. (2022), "Reducing Activation
Recomputation in Large Transformer Models", for RMS norms, gated MLPs, grouped queries and an attention that keeps no
matrix of scores, in fused kernels. They are an upper bound: every sequence of a micro-batch is taken to be
model.seq_length long. What no formula gives is an assumption, and named as one below.
"""

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from nemo_edo.config import (
    FUSED_FROM_LOGITS,
    ArmConfig,
    IDPOConfig,
    LoopConfig,
    LoRAConfig,
    ParallelismConfig,
    PrecisionConfig,
    RunConfig,
    SFTConfig,
)
from nemo_edo.config.checks import SettingError
from nemo_edo.config.compose import arm_configs
from nemo_edo.config.generation import AUTO
from nemo_edo.config.model_shape import ModelShape, check_expected
from nemo_edo.data.model_folder import read_fields
from nemo_edo.errors import UserError
from nemo_edo.generation.batch_size import FP32, MOST_ON_CPU, decoding_bytes
from nemo_edo.megatron.splits import check_adapters, check_splits, check_world

# Assumed: CUDA's context, the workspaces of cuBLAS and Transformer Engine, NCCL's buffers; on a CPU, Python with its
# libraries, of which 0.73 to 0.86 GB were measured.
OVERHEAD, CPU_OVERHEAD = int(3e9), int(1e9)
FRAGMENTATION = 0.05  # assumed: share of what is allocated that PyTorch's allocator cannot use
LOSS_BLOCK, CPU_LOSS_BLOCK = 2**26, 2**22  # logits that the fused loss layer makes at a time (parallel.logprobs)
ASSUMED_PROMPT = 200  # tokens of a prompt, where the problems are not at hand
EVALUATION = "evaluation"  # the name of the workload of a run that trains nothing


@dataclass(frozen=True)
class Workload:
    """What is trained, how it is split, and how much of it is in memory at a time."""

    shape: ModelShape
    parallelism: ParallelismConfig
    precision: PrecisionConfig
    lora: LoRAConfig
    data_parallel: int
    tokens: int  # of a micro-batch, padding included
    copies: float | None = None  # of a token in attention in the mean, where sequences share prompts; None: they do not
    reference: str = "none"  # where the reference's copy of the weights is: none, host or resident
    fused_loss: bool = False  # whether the loss layer makes its logits a block at a time
    generation_rows: int = 0  # sequences decoded at a time on one data-parallel rank, in the trainer's own process
    cached_positions: int = 0  # tokens of these whose keys and values are kept, prompts and responses together
    cpu: bool = False  # whether the device is a CPU: then its memory is the host's
    trains: bool = True  # False: the policy only generates responses

    @property
    def bytes_per_number(self) -> int:
        """Bytes of one weight or activation."""
        return 2 if self.precision.dtype == "bf16" else FP32

    @property
    def stages(self) -> int:
        return self.parallelism.pipeline_model_parallel_size

    @property
    def layers(self) -> int:
        """Layers of one pipeline stage."""
        return self.shape.num_layers // self.stages

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
    activations: int  # what the backward pass needs, of all micro-batches in flight
    loss_layer: int
    generation: int  # the cache and the logits of the tokens to choose, while no activations are kept
    overhead: int  # the two assumptions
    host: int  # in the host's memory, for each GPU: reference and offloaded state; none in addition to a CPU's
    checkpoint: int  # in the host's memory, for each GPU, while a checkpoint is written or read

    @property
    def always(self) -> int:
        """Needed in training and in generation."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> int:
        """The peak: in training or in generation, whichever needs more."""
        return self.always + max(self.activations + self.loss_layer, self.generation) + self.overhead

    @property
    def generating(self) -> int:
        """The peak in generation."""
        return self.always + self.generation + self.overhead

    def items(self) -> Iterator[tuple[str, int]]:
        """Each part on the GPU by its name."""
        names = [field.name for field in fields(self) if field.name not in ("host", "checkpoint")]
        return ((name.replace("_", " "), getattr(self, name)) for name in names)


def stage_memory(load: Workload, stage: int) -> Memory:
    """Memory of a GPU on a pipeline stage, counted from 0; its tensor- and data-parallel neighbours are alike."""
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

    # Adam's two moments and, with bf16, the fp32 weights; a distributed optimizer splits them over ranks of the same.
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
        checkpoint=number * (parameters + adapters) + state if load.trains else 0,
    )
    overhead = CPU_OVERHEAD if load.cpu else OVERHEAD
    return replace(memory, overhead=overhead + round(FRAGMENTATION * memory.total))


def activation_bytes(load: Workload, stage: int) -> int:
    """What the backward pass keeps of all micro-batches in flight, and the gradients of one layer's; where
    layers are recomputed in groups, all of the group's own."""
    splits, later = load.parallelism, load.stages - 1 - stage
    chunks = splits.virtual_pipeline_model_parallel_size or 1  # which micro-batches pass at different times
    # Forward passes of a chunk that wait for their backward pass, at most: those of Megatron's warm-up, and one.
    in_flight = later + 1 if chunks == 1 else 2 * later + (chunks - 1) * load.stages + 1
    recomputed = 0
    if splits.recompute_granularity == "full":
        recomputed = splits.recompute_num_layers if splits.recompute_method == "uniform" else 1
    return in_flight * kept_of_layers(load) // chunks + (recomputed + 1) * layer_activation_bytes(load)


def _layer_numbers(load: Workload) -> dict[str, float]:
    """Numbers of a token that the backward pass needs of one layer, by its parts; what selective recomputation leaves
    out has the names of recompute_modules."""
    shape, tensor = load.shape, load.parallelism.tensor_model_parallel_size
    # The projection's output, of which values are a view; queries and keys with their rotation; the attention's output.
    attention = 3 * shape.query_width + 3 * shape.key_width
    if load.copies is not None:  # queries, keys, values and results of whole sequences, and the pack's results
        attention = load.copies * 2 * (shape.query_width + shape.key_width) + shape.query_width
    attention += shape.query_width + shape.key_width if shape.qk_norm else 0  # the inputs of their own norms
    mlp = 0 if shape.num_moe_experts else 3 * shape.ffn_hidden_size  # gate and up projections, and their product
    # Tokens are taken to be split evenly over the experts: a copy for each of a token's experts, with the projections
    # and their weighted product. Ranks that share an expert gather their rows.
    rows = shape.moe_router_topk * load.expert_tensor / tensor
    # Without sequence parallelism every tensor-parallel rank has both norms' inputs and outputs whole.
    norms = 2 * shape.hidden_size / (tensor if load.parallelism.sequence_parallel else 1)
    return {
        "norms' inputs": norms,
        "layernorm": norms,
        "attention": attention / tensor,  # the fused attention's core keeps nothing to recompute
        "mlp": mlp / tensor,
        "moe": rows * (shape.hidden_size + 3 * shape.moe_ffn_hidden_size / load.expert_tensor),
    }


def layer_activation_bytes(load: Workload) -> int:
    """Activations of one layer and one micro-batch, without recomputation."""
    splits = load.parallelism
    log_sum_exp = FP32 * (load.copies or 1) * load.shape.num_attention_heads / splits.tensor_model_parallel_size
    of_token = load.bytes_per_number * sum(_layer_numbers(load).values()) + log_sum_exp  # of the attention's softmax
    return round(load.tokens // splits.context_parallel_size * of_token)


def kept_of_layers(load: Workload) -> int:
    """Activations of a stage's layers and one micro-batch: of recomputed layers, the input of each group."""
    splits, tokens = load.parallelism, load.tokens // load.parallelism.context_parallel_size
    if splits.recompute_granularity != "full":
        modules = splits.recompute_modules if splits.recompute_granularity == "selective" else ()
        left_out = sum(numbers for part, numbers in _layer_numbers(load).items() if part in modules)
        return load.layers * (layer_activation_bytes(load) - round(tokens * load.bytes_per_number * left_out))
    shares = splits.tensor_model_parallel_size if splits.sequence_parallel else 1
    layer_input = load.bytes_per_number * tokens * load.shape.hidden_size // shares
    group = splits.recompute_num_layers
    if splits.recompute_method == "uniform":
        return math.ceil(load.layers / group) * layer_input
    recomputed = min(group * (splits.virtual_pipeline_model_parallel_size or 1), load.layers)
    return recomputed * layer_input + (load.layers - recomputed) * layer_activation_bytes(load)


def loss_layer_bytes(load: Workload) -> int:
    """Bytes on the last stage: logits and their gradients; Megatron makes fp32 ones of bf16 ones, which are kept as
    well. Fused: a block of logits, the hidden states, and the gradients of these (fp32) and of the output weights."""
    tokens = load.tokens // load.parallelism.context_parallel_size
    columns = load.shape.vocab_size // load.parallelism.tensor_model_parallel_size
    if load.fused_loss:
        hidden = tokens * load.shape.hidden_size * (load.bytes_per_number + FP32)
        weights = columns * load.shape.hidden_size * load.bytes_per_number
        block = CPU_LOSS_BLOCK if load.cpu else LOSS_BLOCK
        return load.bytes_per_number * min(block, tokens * columns) + hidden + weights
    return 2 * sum({load.bytes_per_number, FP32}) * tokens * columns


# --- from a config ----------------------------------------------------------------------------------------------------


def model_shape(cfg: RunConfig) -> ModelShape:
    """The sizes in the model's folder if it is on this machine, otherwise those of model.architecture. Raises UserError
    where neither tells the sizes, or the two contradict each other."""
    expected, config_file = cfg.model.architecture, Path(cfg.model.path or "") / "config.json"
    if cfg.model.path is not None and config_file.is_file():
        found = read_fields(config_file.parent)
        check_expected(expected, found, str(config_file))
        return ModelShape.from_hf(found, str(config_file))
    if expected is None:
        raise UserError(
            f"the sizes of the model are not known: {config_file} is not there and model.architecture is null; choose "
            "the model by its name (model=qwen2_5_7b; docs/models.md has the names)"
        )
    if cfg.model.path is None:
        from nemo_edo.builtin_task.model import vocabulary

        expected = {**expected, "vocab_size": len(vocabulary(cfg.data.arithmetic))}
    return ModelShape.from_hf(expected, "model.architecture")


def trainings(cfg: RunConfig) -> dict[str, SFTConfig | ArmConfig]:
    """The sections that train: the warm-up, if there is one, and every arm."""
    return {**({"sft": cfg.sft} if cfg.sft.steps else {}), **arm_configs(cfg)}


def workloads(
    cfg: RunConfig, shape: ModelShape, gpus: int, *, cpu: bool = False, tested: float = math.inf
) -> dict[str, Workload]:
    """The workload of each training by its name, or of ``EVALUATION`` if nothing is trained. gpus: of all nodes
    together, or processes on a CPU; a multiple of the model's ranks. tested: number of test problems, if known."""
    from nemo_edo.data.shares import COPIES  # it imports torch

    ranks = gpus // cfg.parallelism.model_ranks
    columns = shape.vocab_size // cfg.parallelism.tensor_model_parallel_size
    # Tokens in the cache of a full batch. On a CPU, the responses to one prompt read it from one copy (taken as if a
    # batch's prompts were of one length); a greedy response has its prompt alone.
    rows, length, longest = counted_rows(cfg), cfg.model.seq_length, cfg.sampling.max_new_tokens
    groups = [cfg.evaluation.samples * cfg.evaluation.rollouts, *([cfg.sampling.samples_per_prompt] * cfg.has_arms)]
    together, cached = min(groups) // ranks, rows * length
    if cpu and cfg.model.attention in ("auto", "sdpa") and together > 1:
        greedy = min(rows, math.ceil(min(tested, rows * ranks) / ranks))
        cached = max(rows * longest + math.ceil(rows / together) * (length - longest), greedy * length)
    found, trained = {}, trainings(cfg)
    for name, training in (trained or {EVALUATION: cfg.sft}).items():
        reference, tokens, head = "none", micro_batch_tokens(cfg, training), cfg.model.loss_head
        # With adapters the initial policy is the policy without them.
        if isinstance(training, LoopConfig) and not (cfg.lora.rank and training.reference == "initial"):
            if isinstance(training, IDPOConfig) or training.beta > 0:
                reference = training.reference_placement
        found[name] = Workload(
            shape=shape,
            parallelism=cfg.parallelism,
            precision=cfg.precision,
            lora=cfg.lora,
            data_parallel=ranks,
            tokens=tokens,
            copies=COPIES if training.share_prompts else None,
            reference=reference,
            fused_loss=head == "fused" or (head == "auto" and columns * tokens >= FUSED_FROM_LOGITS),
            generation_rows=0 if cfg.generation.is_served else rows,
            cached_positions=cached,
            cpu=cpu,
            trains=bool(trained),
        )
    return found


def counted_rows(cfg: RunConfig) -> int:
    """Sequences that are decoded at a time on one data-parallel rank, in estimates: of auto, which takes as many as
    there is memory for, the most that it takes on a CPU."""
    rows = cfg.generation.max_batch_size
    return MOST_ON_CPU if rows == AUTO else int(rows)


def with_rows_that_fit(cfg: RunConfig, shape: ModelShape, gpus: int, limit: int, *, rows: int, **known) -> RunConfig:
    """The config with the number in place of ``generation.max_batch_size=auto`` that has room in ``limit`` bytes, by
    the estimate: ``rows`` at most and one at least. known: as for ``workloads``."""

    def with_rows(number: int) -> RunConfig:
        return replace(cfg, generation=replace(cfg.generation, max_batch_size=number))

    def is_too_many(number: int) -> bool:
        loads = workloads(with_rows(number), shape, gpus, **known).values()
        return any(stage_memory(load, stage).generating > limit for load in loads for stage in range(load.stages))

    return with_rows(max(1, bisect.bisect_left(range(1, rows + 1), True, key=is_too_many)))


def for_estimate(
    cfg: RunConfig, data_parallel: int, *, longest: int | None = None, train: float = math.inf, test: float = math.inf
) -> RunConfig:
    """The config with what is decoded at a time at most in place of ``generation.max_batch_size``, as a rank may have
    fewer responses to generate than that, and with a number for ``model.seq_length``. longest: tokens of the longest
    sequence; None: an assumption. train, test: numbers of problems; infinite where they are not known."""
    asked = [test * cfg.evaluation.samples * cfg.evaluation.rollouts]
    for training in trainings(cfg).values():
        if isinstance(training, LoopConfig):
            asked.append(min(training.problems_per_iteration or train, train) * cfg.sampling.samples_per_prompt)
    rows = math.ceil(min(counted_rows(cfg), min(cfg.generation.part_size, max(asked)) / data_parallel))
    rooms = [  # for one sequence, which the data fit into where they are not known yet
        training.micro_batch_tokens // (2 if isinstance(training, IDPOConfig) else 1)
        for training in trainings(cfg).values() if training.micro_batch_tokens is not None
    ]  # fmt: skip
    assumed = min([ASSUMED_PROMPT + cfg.sampling.max_new_tokens, *rooms])
    generation = replace(cfg.generation, max_batch_size=rows)
    try:
        model = replace(cfg.model, seq_length=cfg.model.seq_length or longest or assumed)
        return replace(cfg, model=model, generation=generation)
    except SettingError as error:
        raise UserError(str(error)) from error


def problems(cfg: RunConfig, split: str) -> float:
    """The number of "train" or "test" problems, as far as it is known without a tokenizer; otherwise infinite."""
    if cfg.data.is_built_in:
        return getattr(cfg.data.arithmetic, f"{split}_problems")
    path = Path(getattr(cfg.data, split) or "")
    if path.suffix != ".jsonl" or not path.is_file():
        return math.inf
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def micro_batch_tokens(cfg: RunConfig, training: SFTConfig | ArmConfig) -> int:
    """Tokens of the largest micro-batch: every sequence as long as model.seq_length allows."""
    tokens = training.micro_batch_size * cfg.model.seq_length
    if training.packing:
        return training.micro_batch_tokens
    return tokens if training.micro_batch_tokens is None else min(tokens, training.micro_batch_tokens)


def largest(loads: dict[str, Workload]) -> tuple[str, list[Memory]]:
    """The training whose fullest GPU needs most, and the memory of a GPU of each pipeline stage in it."""
    memories = {name: [stage_memory(load, stage) for stage in range(load.stages)] for name, load in loads.items()}
    name = max(memories, key=lambda name: max(memory.total for memory in memories[name]))
    return name, memories[name]


def fullest(cfg: RunConfig, shape: ModelShape, gpus: int, **known) -> Memory:
    """The memory of the GPU that needs most, over all trainings and pipeline stages. known: as for ``workloads``."""
    return max(largest(workloads(cfg, shape, gpus, **known))[1], key=lambda memory: memory.total)


def check_possible(cfg: RunConfig, shape: ModelShape, gpus: int) -> None:
    """Raises UserError for splits that do not divide the model or the GPUs, and for adapters that it cannot have."""
    check_world(cfg.parallelism, gpus)
    check_splits(shape, cfg.parallelism, shape.vocab_size)
    check_adapters(cfg.lora, shape, cfg.parallelism.tensor_model_parallel_size)


def is_possible(cfg: RunConfig, shape: ModelShape, gpus: int) -> bool:
    try:
        check_possible(cfg, shape, gpus)
    except UserError:
        return False
    return True
