"""How fast training is here: tokens a second, and the share of a plain matrix product's rate (MFU)."""

from __future__ import annotations

import time

from nemo_edo.checks.findings import Finding, passed
from nemo_edo.checks.iteration_time import TRAINING_EFFICIENCY, matrix_parameters
from nemo_edo.checks.machine import Machine
from nemo_edo.config.model_shape import ModelShape

LIMIT_S = 120.0
ROUNDS = 3
GPU_SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
             "head_dim": 128, "num_hidden_layers": 4, "vocab_size": 32000}  # fmt: skip
"""Llama-3-8B's width, in four layers."""
CPU_SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4,
             "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 4096}  # fmt: skip


def training(machine: Machine) -> Finding:
    """On the first rank's device alone, compared with the share of the peak that the doctor's estimates assume."""
    per_s, flops_per_token, peak = machine.run(_measure, machine.scratch, bool(machine.gpus), limit_s=LIMIT_S)
    share = per_s * flops_per_token / peak
    return passed(
        f"{per_s:,.0f} tokens/s, {share:.2f} of a plain product's {peak / 1e12:,.2f} TFLOP/s; the doctor's estimates "
        f"assume {TRAINING_EFFICIENCY:.2f} of the GPU's peak",
        tokens_per_s=per_s, mfu=share, product_tflops=peak / 1e12,
    )  # fmt: skip


def _measure(scratch, gpu: bool) -> tuple[float, float, float]:
    """Tokens a second of a forward and backward pass, its operations per token, and those a second of a product."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from nemo_edo.checks.tiny_model import Setting, build
    from nemo_edo.types import TrainingBatch

    shape, rows, length = (GPU_SHAPE, 8, 2048) if gpu else (CPU_SHAPE, 4, 256)
    config = LlamaConfig(**shape, max_position_embeddings=length, tie_word_embeddings=False)
    folder = scratch / "speed"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    precision = "bf16" if gpu else "fp32"
    model = build(folder, Setting(precision, loss_head="auto", training={"micro_batch_size": rows // 4}))
    tokens = torch.randint(2, shape["vocab_size"], (rows, length))
    ones = torch.ones(rows, length - 1)
    batch = TrainingBatch(tokens, ones, advantages=torch.ones(rows), old_logprobs=-5 * ones, ref_logprobs=-5 * ones)
    device = model.platform_device
    seconds = _seconds(lambda: model.get_loss_and_metrics(batch, forward_only=False), device)
    size = 8192 if gpu else 1024
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    product = _seconds(lambda: matrix @ matrix, device)
    parameters = matrix_parameters(ModelShape.from_hf(config.to_dict(), str(folder)))
    return rows * length / seconds, 6 * parameters, 2 * size**3 / product


def _seconds(call, device) -> float:
    """Of one call, the first of which is not counted."""
    import torch

    begin = 0.0
    for repetition in range(ROUNDS + 1):
        if repetition == 1:
            begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - begin) / ROUNDS
