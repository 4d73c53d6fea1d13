"""A model folder's log-probabilities of given tokens, in vLLM's environment: families_table.py compares them.

python vllm_logprobs.py FOLDER TOKENS.json OUT.json    # rows of token ids; of each token but the first
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main(folder: str, tokens: str, out: str) -> None:
    rows = json.loads(Path(tokens).read_text())
    engine = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=len(rows[0]) + 8, skip_tokenizer_init=True)
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": row} for row in rows], asked)
    found = [
        [entry[token].logprob for token, entry in zip(row[1:], answer.prompt_logprobs[1:], strict=True)]
        for row, answer in zip(rows, answers, strict=True)
    ]
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
