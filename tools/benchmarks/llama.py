"""The models of the benchmarks."""

from __future__ import annotations

from pathlib import Path

import torch


def write_model(folder: Path, *, context: int = 128, **architecture: int) -> None:
    """A Llama folder with random weights, head size 64, 64 tokens, and its tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        head_dim=64,
        num_key_value_heads=architecture["num_attention_heads"],
        max_position_embeddings=context,
        tie_word_embeddings=True,
        **architecture,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="1").save_pretrained(folder)
