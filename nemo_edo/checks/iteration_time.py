"""How long an iteration of GRPO takes on H100s, from sizes alone.

Counts of floating-point operations and of bytes are exact for dense models but for what is small (norms, softmax); what
share of the hardware's peak they reach is an assumption, fitted to two published runs
(``tests/unit/checks/test_models_page.py`` compares the estimates with these and with others; docs/models.md).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from nemo_edo.config.model_shape import ModelShape

# Assumed: share of the peak in forward and backward passes over responses of very different lengths. Pre-training on
# full sequences reaches 0.37 of FP8's peak and about 0.45 of BF16's (Megatron-Bridge's performance summary).
TRAINING_EFFICIENCY = 0.30
# Assumed: share of the memory's bandwidth that decoding with vLLM or TensorRT-LLM reaches, all overheads included.
DECODING_BANDWIDTH = 0.45
PROMPT_EFFICIENCY = 0.50  # assumed: share of the peak when prompts are read
CACHE_SHARE = 0.90  # of a server's memory, for weights and cache together (vLLM's gpu_memory_utilization)
STEP_OF_A_LAYER_S = 5e-4  # assumed: Python's time in the trainer to launch a layer's kernels for a step of decoding
REFIT_BANDWIDTH = 0.50  # assumed: share of the links', with the conversion between Megatron's layout and Hugging Face's
# An H100 SXM's figures, per second, by NVIDIA's data sheet, without sparsity; the network to other nodes is that of a
# DGX H100: one 400 Gbit/s port for each GPU.
BF16_FLOPS, FP8_FLOPS = 989e12, 1979e12
GPU_BYTES, GPU_BANDWIDTH = 80e9, 3.35e12
NETWORK = 50e9


@dataclass(frozen=True)
class Iteration:
    """An iteration of GRPO, and what it runs on. Lengths are in tokens."""

    shape: ModelShape
    gpus: int  # of the trainer
    server_gpus: int  # of the servers; the trainer's, if they take turns
    server_tensor_parallel: int  # GPUs of a server; in process: ranks that share a layer
    samples: int
    prompt: int
    response: int  # in the mean
    longest: int  # response: the batch shrinks during its generation, but each of its steps takes time
    epochs: int = 1
    reference: bool = True  # whether the loss has a KL to the reference
    recomputation: bool = False  # whether the backward pass recomputes all layers' activations
    fp8: bool = False  # in training
    server_fp8: bool = False  # in generation, whose weights and cache then have a byte a number
    stages: int = 1  # in process, pipeline stages, which take turns in each step
    rows: float = math.inf  # responses that one server, or the ranks of one model, decode at a time at most
    in_process: bool = False  # the trainer generates, in batches, each of which ends with its longest response
    overlapped: bool = False  # the next samples are generated while these are trained on (one step off policy)
    gpu_bytes: float = GPU_BYTES

    @property
    def peak(self) -> float:
        """FLOPs of one GPU."""
        return FP8_FLOPS if self.fp8 else BF16_FLOPS


class Times(NamedTuple):
    """Seconds of an iteration's parts."""

    generation: float
    logprobs: float  # under the old policy, and under the reference if there is one
    training: float
    refit: float
    total: float
    tokens_per_gpu: float  # trained on, prompts included, for each second of the iteration and each GPU


def iteration_times(plan: Iteration) -> Times:
    """The servers' tensor-parallel size divides their GPUs."""
    length = plan.prompt + plan.response
    tokens = plan.samples * length
    forward = tokens * forward_flops(plan.shape, length) / (plan.gpus * plan.peak * TRAINING_EFFICIENCY)
    training = plan.epochs * forward * (4 if plan.recomputation else 3)
    logprobs = forward * (2 if plan.reference else 1)
    generation, trainer = generation_seconds(plan), logprobs + training
    refit = 0.0 if plan.in_process else refit_seconds(plan)
    total = (max(generation, trainer) if plan.overlapped else generation + trainer) + refit
    gpus = plan.gpus + (0 if plan.server_gpus == plan.gpus and not plan.overlapped else plan.server_gpus)
    return Times(generation, logprobs, training, refit, total, tokens / total / gpus)


def forward_flops(shape: ModelShape, length: float) -> float:
    """Operations per token in a sequence of this length: two for each weight of the matrices that it meets, the output
    layer's included, and the scores and sums of causal attention, half of a full square (as in Megatron-LM's count)."""
    return 2 * matrix_parameters(shape) + 2 * shape.num_layers * shape.query_width * length


def matrix_parameters(shape: ModelShape) -> int:
    """Weights that a token is multiplied with: of a mixture's experts, those that it is sent to."""
    layer = sum(outputs * inputs for outputs, inputs in shape.layer_matrices.values()) + shape.layer_router
    layer += shape.moe_router_topk * sum(outputs * inputs for outputs, inputs in shape.expert_matrices.values())
    return shape.num_layers * layer + shape.embedding_parameters


def generation_seconds(plan: Iteration) -> float:
    """Time to read the prompts and generate all responses, on replicas that share them evenly; infinite where not even
    one response has room. A step of decoding reads the weights once, and every running response's keys and values. All
    start together if the cache has room, otherwise in turns; the longest response decides when a turn ends."""
    size, shape, number = plan.server_tensor_parallel, plan.shape, 1 if plan.server_fp8 else 2
    cached = 2 * shape.num_layers * shape.key_width * number  # a token's keys and values in all layers
    weights = shape.parameters * number
    room = CACHE_SHARE * size * plan.stages * plan.gpu_bytes - weights
    # A token's mean position: long responses have most tokens. With lengths as spread as mean and longest tell, up to
    # an exponential distribution's spread.
    spread = min(1.0, (plan.longest / plan.response - 1) ** 2 / 3)
    mean_length = plan.prompt + plan.response / 2 * (1 + spread)
    each = plan.samples / (plan.server_gpus // (size * plan.stages))
    fits = room / (cached * (plan.prompt + plan.response))
    if fits < 1:
        return math.inf
    at_a_time = min(each, fits, plan.rows)
    bandwidth = size * GPU_BANDWIDTH * DECODING_BANDWIDTH
    # Rows times steps is the number of tokens, whatever the lengths are; weights are read in every step.
    steps = plan.longest if at_a_time == each else plan.response * each / at_a_time + plan.longest - plan.response
    if plan.in_process:
        steps = plan.longest * math.ceil(each / at_a_time)
    launching = steps * shape.num_layers * STEP_OF_A_LAYER_S if plan.in_process else 0.0
    reading = steps * weights + each * plan.response * mean_length * cached
    peak = size * (FP8_FLOPS if plan.server_fp8 else BF16_FLOPS) * PROMPT_EFFICIENCY
    prompts = each * plan.prompt * forward_flops(shape, plan.prompt) / peak
    decoding = each * plan.response * forward_flops(shape, mean_length) / peak
    return prompts + max(reading / bandwidth, decoding, launching)


def refit_seconds(plan: Iteration) -> float:
    """Every server's GPU gets its share of the weights in bf16 over the network, all of them at a time: each trainer's
    shard is broadcast once."""
    share = 2 * plan.shape.parameters / plan.server_tensor_parallel
    return share / (NETWORK * REFIT_BANDWIDTH)
