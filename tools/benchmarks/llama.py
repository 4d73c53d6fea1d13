"""The models of the benchmarks."""

from __future__ import annotations

from pathlib import Path

import torch

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
"""The shape of SmolLM2-135M."""


def write_model(folder: Path, *, context: int = 128, end: int = 1, **architecture: int) -> None:
    """A Llama folder with random weights, head size 64, by default 64 tokens, and its tokenizer: numbers with spaces
    between.

    end: the token that ends a response; from the vocabulary's size on, one that the model cannot sample. Tokens 0 (for
    padding) and ``end`` have names that are no numbers: a tokenizer cuts special tokens out of any text around them.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    shape = {"vocab_size": 64, "num_key_value_heads": architecture["num_attention_heads"], **architecture}
    # Llama's own ends, tokens 1 and 2, would end a response in libraries that read the model's generation config.
    ends = {"bos_token_id": None, "eos_token_id": end}
    config = LlamaConfig(head_dim=64, max_position_embeddings=context, tie_word_embeddings=True, **ends, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokens = max(shape["vocab_size"], end + 1)
    names = {0: "<pad>", end: "<end>"}
    tokenizer = Tokenizer(models.WordLevel({names.get(i, str(i)): i for i in range(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.save_pretrained(folder)
