"""Tiny Hugging Face models with the built-in task's tokenizer, written by ``transformers`` with random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from nemo_edo.config import ArithmeticConfig
from nemo_edo.data.arithmetic_model import write_tokenizer

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
VOCAB_SIZE = 129
"""One more than the tokenizer's 128 tokens, as real models have it, and odd: tensor parallelism has to pad it."""


def write_tiny_model(folder: Path, model_type: str = "qwen2", *, seed: int = 0, **fields) -> Path:
    """Writes and returns ``folder``. Weights are far from their usual start (biases 0, norms 1, logits near 0), so
    that a weight that is lost or misplaced shows in the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = write_tokenizer(folder, ArithmeticConfig(num_operands=2))
    config = AutoConfig.for_model(
        model_type,
        **{"vocab_size": VOCAB_SIZE, "tie_word_embeddings": False, "initializer_range": 0.15, **SHAPE, **fields},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
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
