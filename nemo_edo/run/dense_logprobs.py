"""Log-probabilities as transformers computes them, in a separate process: python -m nemo_edo.run.dense_logprobs.

The process takes the memory of transformers' copy with it, and knows no process group.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from nemo_edo.utils.processes import end_with


def main(folder: str, out: str, rounded: str) -> None:
    """Of the token ids in ``out``/tokens.pt, writes [1 or 2, B, T - 1] in fp32, followed by those in bf16 where
    ``rounded`` is not empty, to ``out``/logprobs.pt."""
    end_with(os.getppid())
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))  # torchrun leaves its processes one
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.load(Path(out) / "tokens.pt")
    found = [logprobs(model, tokens)]
    if rounded:
        found.append(logprobs(model.to(torch.bfloat16), tokens))
    torch.save(torch.stack(found), Path(out) / "logprobs.pt")


@torch.no_grad()
def logprobs(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Log-probabilities [B, T - 1] of tokens[:, 1:]."""
    log_p = model(tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return log_p.gather(-1, tokens[:, 1:, None]).squeeze(-1)


if __name__ == "__main__":
    main(*sys.argv[1:])
