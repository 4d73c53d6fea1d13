"""Checks that compute one training step of a tiny model in many ways: each must give the numbers of fp32 in one
process. And how fast training is.

Torch is imported by the functions: the doctor reads the list of checks without it.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nemo_edo.checks.iteration_time import TRAINING_EFFICIENCY, matrix_parameters
from nemo_edo.checks.machine import Finding, Machine, failed, passed
from nemo_edo.checks.machine_checks import seconds_of
from nemo_edo.config import PrecisionConfig
from nemo_edo.config.model_shape import ModelShape
from nemo_edo.types import TrainingBatch

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 8192,
         "initializer_range": 0.04, "tie_word_embeddings": False}  # fmt: skip
"""Divides over eight ranks in every direction but the layers; heads of 64, which flash attention has kernels for."""
LLAMA, QWEN, MIXTURE = "llama", "qwen2", "qwen3_moe"  # model types, and the names of their folders
MODELS = {
    LLAMA: {},
    QWEN: {"num_key_value_heads": 2, "tie_word_embeddings": True},  # and biases of queries, keys and values
    MIXTURE: {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
ROWS, LENGTH, PROMPT = 16, 128, 40  # the size of a batch; lengths suit every split and FP8's multiples
LONG = 8192
GROUP = 4  # responses to a prompt
TEMPERATURE = 0.7
EXPLORATION_WEIGHT = 0.1
OPTIMIZER = {"lr": 1e-3, "adam_eps": 1e-3}
"""With Adam's usual eps a first step is the gradient's sign, which rounding flips where it is near zero."""
PACKED = {"packing": True, "micro_batch_tokens": 1024}

FASTEST = "bf16 on GPUs, fp32 on CPUs"
FP8 = {"dtype": "bf16", "fp8": "hybrid"}
PRECISIONS = {
    "fp32": {"dtype": "fp32"},
    "tf32": {"dtype": "fp32", "tf32": True},
    "bf16": {"dtype": "bf16"},
    **{f"fp8 {recipe}": {**FP8, "fp8_recipe": recipe} for recipe in ("tensorwise", "delayed", "blockwise", "mxfp8")},
}


class Bounds(NamedTuple):
    """Largest deviations: of log-probabilities and entropies in nats, before and after the step; of the loss and the
    gradient's norm, relative to their size (the loss's is at least 1)."""

    values: float
    loss: float
    grad_norm: float
    after: float


BF16 = Bounds(0.15, 0.05, 0.1, 0.3)
BOUNDS = {
    "fp32": Bounds(1e-4, 1e-4, 1e-3, 2e-3),
    "tf32": Bounds(*(bound * 2**-3 for bound in BF16)),
    "bf16": BF16,
    "fp8": Bounds(0.6, 0.2, 0.3, 1.0),
}
"""TF32's numbers have three bits more than bf16's. The bounds of bf16 and fp8 are estimates for this model until they
have been measured on GPUs; a wrong layout, scale or mask is off by more."""
TF32_ERROR = 2**-14
"""Relative error of a product, in the root mean square, above which it is no fp32 product: rounding both factors to 11
bits costs 2^-11 / sqrt(6), fp32 less than 1e-6."""


@dataclass(frozen=True)
class Measured:
    """A batch's log-probabilities and entropies [2, B, T], the loss and the gradient's norm of a step on it, and the
    log-probabilities [B, T] after the step."""

    values: np.ndarray
    loss: float
    grad_norm: float
    after: np.ndarray


@dataclass(frozen=True)
class SameNumbers:
    """A check: a step that is computed in this way against the same step of the same model in fp32, in one process."""

    precision: str = "fp32"  # one of PRECISIONS, or FASTEST
    # The dimension that ranks share: tensor, pipeline, context, expert or none. The largest power of two of the ranks
    # share it, at_most so many (a power of two), and the others are data-parallel.
    split: str = ""
    at_most: int = 8
    parallelism: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    attention: str = "auto"
    loss_head: str = "logits"
    tile: int | None = None  # columns that the fused loss kernels take at a time; None: more than this model has
    algorithm: str = "grpo"  # or idpo
    world: bool = False  # whether all ranks take the step together, as they do where they share something
    model: str = LLAMA
    length: int = LENGTH

    def __call__(self, machine: Machine) -> Finding:
        step = self.on(machine)
        found = step.measured(machine)
        if machine.rank > 0:
            return passed("")
        # Last: if rank 0 failed before it met the others, they would wait for it.
        plain = SameNumbers(algorithm=self.algorithm, model=self.model, length=self.length)
        return compared(found, reference(machine, plain), step.bounds)

    def on(self, machine: Machine) -> SameNumbers:
        """The same check with what the machine decides filled in."""
        fastest = "bf16" if machine.gpus else "fp32"
        precision = fastest if self.precision == FASTEST else self.precision
        size = math.gcd(self.at_most, machine.world)
        name = "context_parallel_size" if self.split == "context" else f"{self.split}_model_parallel_size"
        parallelism = {**({name: size} if self.split else {}), **self.parallelism}
        return replace(self, precision=precision, parallelism=parallelism, world=self.world or bool(self.split))

    @property
    def bounds(self) -> Bounds:
        return BOUNDS[self.precision.partition(" ")[0]]

    def measured(self, machine: Machine, *, save: Path | None = None, load: Path | None = None) -> Measured:
        return machine.run(measure, machine.scratch / self.model, self, save, load, world=self.world)


def reference(machine: Machine, plain: SameNumbers) -> Measured:
    key = (plain.model, plain.algorithm, plain.length)
    if key not in machine.references:
        machine.references[key] = plain.measured(machine)
    return machine.references[key]


def products(machine: Machine) -> Finding:
    """Whether precision.tf32 decides how fp32 products are computed; where it does not, fp32 fails below, too."""
    errors = machine.run(errors_of_products, PrecisionConfig())
    detail = ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
    if max(errors.values()) <= TF32_ERROR:
        return passed(f"relative errors: {detail}", **errors)
    return failed(f"with precision.tf32=false relative errors are {detail}: TF32's", **errors)


def compared(found: Measured, expected: Measured, bounds: Bounds) -> Finding:
    return within(
        bounds,
        "deviations",
        values=float(np.abs(found.values - expected.values).max()),
        loss=abs(found.loss - expected.loss) / max(abs(expected.loss), 1.0),
        grad_norm=abs(found.grad_norm - expected.grad_norm) / expected.grad_norm,
        after=float(np.abs(found.after - expected.after).max()),
    )


def within(bounds: Bounds, what: str, **far: float) -> Finding:
    """far: deviations by the names of their bounds."""
    detail = f"{what}: " + ", ".join(f"{name.replace('_', ' ')} {size:.1e}" for name, size in far.items())
    too_far = [name for name, size in far.items() if not size <= getattr(bounds, name)]  # NaN is too far
    if not too_far:
        return passed(detail, **far)
    allowed = ", ".join(f"{name.replace('_', ' ')} at most {getattr(bounds, name):.0e}" for name in too_far)
    return failed(f"{detail}; expected {allowed}", **far)


def against_transformers(machine: Machine, model: str = LLAMA) -> Finding:
    """The reference of the other checks."""
    found = reference(machine, SameNumbers(model=model))
    expected = machine.run(of_transformers, machine.scratch / model)
    return compared(found, replace(found, values=expected), SameNumbers().bounds)


def token_by_token(machine: Machine) -> Finding:
    """Tokens sampled with stored keys and values must have the log-probabilities of a pass over the sequence."""
    step = SameNumbers(FASTEST).on(machine)
    sampled, whole = machine.run(generated, machine.scratch / LLAMA, step)
    return within(step.bounds, f"deviations of {len(sampled)} tokens", values=float(np.abs(sampled - whole).max()))


def checkpoint_at_another_layout(machine: Machine) -> Finding:
    """The weights after a step, written by all ranks as one layout, read by one process (and its log-probabilities
    compared with those that were measured before writing)."""
    folder = machine.folder / "checkpoint"
    before = SameNumbers(split="tensor").on(machine).measured(machine, save=folder)
    if machine.rank > 0:
        return passed("")
    after = SameNumbers().measured(machine, load=folder)
    return within(SameNumbers().bounds, "deviations", values=float(np.abs(after.values[0] - before.after).max()))


# --- what the processes of checks compute -----------------------------------------------------------------------------


def write_model(folder: Path, dtype: str = "float32", **sizes: int) -> Path:
    """A Hugging Face folder with random weights, the same wherever it is written, of the type that is its name."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**SHAPE, **MODELS[folder.name], **sizes, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(folder.name, **fields))
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # transformers begins with zeros, which a lost bias would not change
                parameter.normal_(std=0.1)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def batch(length: int = LENGTH) -> TrainingBatch:
    """Responses of many lengths, groups of which share a prompt; made-up log-probabilities of two other policies."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, SHAPE["vocab_size"], (ROWS, length), generator=generator)
    groups = torch.arange(ROWS) // GROUP
    tokens[:, :PROMPT] = tokens[groups * GROUP, :PROMPT]
    ends = torch.randint(PROMPT + 8, length + 1, (ROWS, 1), generator=generator)
    ends[0] = length
    places = torch.arange(1, length)
    mask = ((places >= PROMPT) & (places < ends)).float()
    old, ref = (torch.randn(ROWS, length - 1, generator=generator) - 6 for _ in range(2))
    return TrainingBatch(
        tokens=torch.where(torch.arange(length) < ends, tokens, 0),
        mask=mask,
        groups=groups,
        advantages=torch.randn(ROWS, generator=generator),
        old_logprobs=old * mask,
        ref_logprobs=ref * mask,
        pair_role=torch.tensor([1, -1]).repeat(ROWS // 2),
        exploration_factors=torch.ones(ROWS),
    )


def measure(folder: Path, step: SameNumbers, save: Path | None, load: Path | None) -> Measured:
    """A step of ED-GRPO or ED-iDPO from the folder's weights. save: a checkpoint folder for the weights after the
    step; load: one that they are read from before it."""
    import torch

    from nemo_edo.megatron import checkpoint
    from nemo_edo.worker.remote import policy_over

    model = build(folder, step)
    if load is not None:
        checkpoint.load(model.policy, load)
    examples = batch(step.length)
    if step.algorithm == "grpo":
        examples = examples.with_fields(pair_role=None, exploration_factors=None)
    policy = policy_over(model)
    values = torch.stack(policy.logprobs(examples))
    model.start_training(total_steps=1)
    metrics = policy.train_step(examples, exploration_weight=EXPLORATION_WEIGHT)
    if save is not None:
        checkpoint.save(model.policy, save)
    return Measured(values.numpy(), metrics["loss"], metrics["grad_norm"], policy.logprobs(examples)[0].numpy())


def build(folder: Path, step: SameNumbers):
    from nemo_edo.config import GRPOConfig, IDPOConfig, OptimizerConfig, ParallelismConfig
    from nemo_edo.models import MegatronGPTDPOModel, MegatronGPTGRPOModel
    from nemo_edo.models.megatron_gpt_model import model_config

    if step.tile is not None:
        from nemo_edo.parallel import kernels  # imports Triton

        kernels.TILE = step.tile
    kinds = {"grpo": (MegatronGPTGRPOModel, GRPOConfig), "idpo": (MegatronGPTDPOModel, IDPOConfig)}
    kind, config = kinds[step.algorithm]
    settings = {"beta": 0.04, "exploration_coefficient": EXPLORATION_WEIGHT, "micro_batch_size": 4, **step.training}
    return kind(
        model_config(
            folder,
            parallelism=ParallelismConfig(**step.parallelism),
            precision=PrecisionConfig(**PRECISIONS[step.precision]),
            seed=0,
            training=config(optimizer=OptimizerConfig(**OPTIMIZER), **settings),
            temperature=TEMPERATURE,
            attention=step.attention,
            loss_head=step.loss_head,
        )
    )


def generated(folder: Path, step: SameNumbers) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of generated tokens, all responses in a row: as sampled one by one, and by one whole pass."""
    from nemo_edo.data.batching import build_batch
    from nemo_edo.generation.megatron_engine import MegatronEngine
    from nemo_edo.types import GenerationRequest, SamplingParams

    model = build(folder, step)
    built = model.policy.built
    engine = MegatronEngine(built, stop_ids=[1], decode=str, max_batch_size=ROWS, device=model.platform_device)
    prompts = [tuple(range(20, 20 + length)) for length in (3, 1, 17)]
    requests = [GenerationRequest(str(place), 0, prompt, seed=place) for place, prompt in enumerate(prompts)]
    rollouts = engine.generate(requests, SamplingParams(TEMPERATURE, 1.0, 24))
    sequences = [(rollout.prompt_ids, rollout.response_ids) for rollout in rollouts]
    examples = build_batch(sequences, pad_id=0, length=LENGTH)
    whole = model.get_inference_log_probs(examples)[examples.mask.bool()]
    return np.concatenate([rollout.response_logprobs for rollout in rollouts]), whole.numpy()


def errors_of_products(precision: PrecisionConfig) -> dict[str, float]:
    """Relative errors of fp32 products in the root mean square, by what computes them."""
    import torch

    from nemo_edo.megatron import platform
    from nemo_edo.megatron.precision import allow_tf32

    device = platform.enter()
    allow_tf32(precision.tf32)
    weight, rows = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0)).to(device)
    layers = {"torch": torch.nn.Linear(256, 256, bias=False, device=device)}
    if find_spec("transformer_engine") is not None:
        from transformer_engine.pytorch import Linear

        layers["Transformer Engine"] = Linear(256, 256, bias=False, params_dtype=torch.float32, device=device)
    exact, errors = rows.double() @ weight.double().T, {}
    for name, layer in layers.items():
        with torch.no_grad():
            layer.weight.copy_(weight)
            errors[name] = float((layer(rows) - exact).norm() / exact.norm())
    return errors


def of_transformers(folder: Path, length: int = LENGTH) -> np.ndarray:
    """[2, B, T] as in ``Measured.values``, in fp32 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    examples = batch(length)
    with torch.no_grad():
        log_p = (model(examples.tokens).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
    logprobs = log_p.gather(-1, examples.tokens[:, 1:, None]).squeeze(-1)
    return (torch.stack([logprobs, -(log_p.exp() * log_p).sum(-1)]) * examples.mask).numpy()


# --- speed ------------------------------------------------------------------------------------------------------------

SPEED_LIMIT_S, RESUME_LIMIT_S = 120.0, 180.0
SPEED_ROUNDS = 3
GPU_SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
             "head_dim": 128, "num_hidden_layers": 4, "vocab_size": 32000}  # fmt: skip
"""Llama-3-8B's width, in four layers."""
CPU_SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4,
             "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 4096}  # fmt: skip


def speed(machine: Machine) -> Finding:
    """The first rank's device alone trains; compared with the share of the peak that the doctor's estimates assume."""
    per_s, flops_per_token, peak = machine.run(_speed, machine.scratch, bool(machine.gpus), limit_s=SPEED_LIMIT_S)
    share = per_s * flops_per_token / peak
    return passed(
        f"{per_s:,.0f} tokens/s, {share:.2f} of a plain product's {peak / 1e12:,.2f} TFLOP/s; the doctor's estimates "
        f"assume {TRAINING_EFFICIENCY:.2f} of the GPU's peak",
        tokens_per_s=per_s, mfu=share, product_tflops=peak / 1e12,
    )  # fmt: skip


def _speed(scratch: Path, gpu: bool) -> tuple[float, float, float]:
    """Tokens a second of a forward and backward pass, its operations per token, and those a second of a product."""
    import torch

    shape, rows, length = (GPU_SHAPE, 8, 2048) if gpu else (CPU_SHAPE, 4, 256)
    folder = write_model(scratch / "speed" / LLAMA, "bfloat16", **shape)
    precision = "bf16" if gpu else "fp32"
    model = build(folder, SameNumbers(precision, loss_head="auto", training={"micro_batch_size": rows // 4}))
    tokens, ones = torch.randint(2, shape["vocab_size"], (rows, length)), torch.ones(rows, length - 1)
    examples = TrainingBatch(tokens, ones, advantages=torch.ones(rows), old_logprobs=-5 * ones, ref_logprobs=-5 * ones)
    step = seconds_of(lambda: model.get_loss_and_metrics(examples, forward_only=False), SPEED_ROUNDS)
    size = 8192 if gpu else 1024
    matrix = torch.randn(size, size, device=model.platform_device, dtype=torch.bfloat16 if gpu else torch.float32)
    product = seconds_of(lambda: matrix @ matrix, SPEED_ROUNDS)
    parameters = matrix_parameters(ModelShape.from_hf(shape, str(folder)))
    return rows * length / step, 6 * parameters, 2 * size**3 / product


def memory_of_a_resume(machine: Machine) -> Finding:
    """The host memory of each rank while it reads a checkpoint of a distributed optimizer that all have written. The
    doctor counts its weights and its share of the state; a rank that holds the state of all needs most of their sum."""
    folder, shape = machine.folder / "resumed", {**GPU_SHAPE, "num_hidden_layers": 2}
    used, counted, of_all = machine.run(resumed, machine.scratch, folder, shape, world=True, limit_s=RESUME_LIMIT_S)
    machine.exchange("read", None)
    if machine.rank == 0:  # ten GB
        shutil.rmtree(folder)
    said = f"{used / 1e9:.2f} GB of the host; the doctor counts {counted / 1e9:.2f}"
    if used > 0.9 * of_all:
        return failed(f"{said}, and {of_all / 1e9:.2f} are the state of all ranks", resume_gb=used / 1e9)
    return passed(said, resume_gb=used / 1e9)


def resumed(scratch: Path, out: Path, shape: dict[str, int]) -> tuple[float, float, float]:
    """Bytes of the host that reading a checkpoint takes at most, those counted, and those of all ranks' state."""
    import torch

    from nemo_edo.megatron import checkpoint
    from nemo_edo.worker.remote import policy_over

    folder = write_model(scratch / "wide" / LLAMA, "bfloat16", **shape)
    step = SameNumbers("bf16" if torch.cuda.is_available() else "fp32", parallelism={"use_distributed_optimizer": True})
    model = build(folder, step)
    model.start_training(total_steps=1)
    weights = sum(parameter.numel() for parameter in model.parameters())
    # bf16 has fp32 weights and Adam's two moments for each.
    number, state = (2, 12) if torch.cuda.is_available() else (4, 8)
    examples = batch().with_fields(pair_role=None, exploration_factors=None)
    policy_over(model).train_step(examples, exploration_weight=EXPLORATION_WEIGHT)  # from which on there is a state
    checkpoint.save(model.policy, out, with_optimizer=True)
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far begins again
    before = _resident("VmRSS")
    checkpoint.load(model.policy, out, with_optimizer=True)
    counted = weights * (number + state / torch.distributed.get_world_size())
    return _resident("VmHWM") - before, counted, weights * (number + state)


def _resident(name: str) -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return float(line.split()[1]) * 1024
