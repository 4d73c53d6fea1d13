"""The models of the benchmarks."""

from __future__ import annotations

from pathlib import Path

import torch


def write_model(folder: Path, *, context: int = 128, end: int = 1, **architecture: int) -> None:
    """A Llama folder with random weights, head size 64, 64 tokens, and its tokenizer: numbers with spaces between.

    end: the token that ends a response; from 64 on, one that the model cannot sample.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
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
    tokens = max(64, end + 1)
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(tokens)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=str(end)).save_pretrained(folder)
