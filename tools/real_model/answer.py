"""An exported policy answers a run's test problems in plain ``transformers``, greedily, beside the run's own answers.

    python -m tools.real_model.answer runs/real ed_grpo_floor exported/real

Exits with 1 where fewer than nine tenths of the responses are the same: in bf16 two nearly equal logits may change
places, and a wrong export changes nearly all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_edo.run.stored_run import open_run
from nemo_edo.types import Rollout

SAME = 0.9
SHOWN = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run's folder")
    parser.add_argument("arm")
    parser.add_argument("exported", type=Path, help="what `nemo-edo export` wrote for this arm")
    parser.add_argument("--problems", type=int, default=32, help="how many of the test problems, at most")
    given = parser.parse_args()

    run = open_run(given.run)
    stored = [scored.rollout for scored in run.evaluation_responses(given.arm, "greedy")[: given.problems]]
    model = AutoModelForCausalLM.from_pretrained(given.exported, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(given.exported)
    questions, same = run.questions("test"), 0
    for place, rollout in enumerate(stored):
        found = answer(model, rollout, run.cfg.sampling.max_new_tokens)
        same += found == list(rollout.response_ids)
        if place < SHOWN:
            print(f"{questions[rollout.problem_id]}\n  -> {tokenizer.decode(found, skip_special_tokens=True)!r}\n")
    print(f"{same} of {len(stored)} greedy responses are the run's own, token by token")
    sys.exit(0 if same >= SAME * len(stored) else 1)


@torch.no_grad()
def answer(model, rollout: Rollout, max_new_tokens: int) -> list[int]:
    """The response's token ids, its end token included."""
    prompt = torch.tensor([list(rollout.prompt_ids)])
    whole = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_new_tokens
    )
    return whole[0, prompt.shape[1] :].tolist()


if __name__ == "__main__":
    main()
