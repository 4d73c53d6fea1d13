"""The tokenizer of a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nemo_edo.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """No code that comes with the folder is run. Raises UserError where the tokenizer cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # what tokenizers raises for a damaged file is an Exception of no narrower class
        raise UserError(f"the tokenizer of {folder} cannot be loaded ({error}); copy the model's own there") from error
