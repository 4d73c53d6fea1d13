"""ED-GRPO on GSM8K from a Hugging Face folder: the script form of ``nemo-edo train --config-name grpo_gsm8k``.

torchrun --nproc-per-node 8 examples/train_gpt_grpo.py model.path=/models/llama3-8b-instruct \
    data.train=/data/gsm8k/train.jsonl data.test=/data/gsm8k/test.jsonl
"""

import sys

from nemo_edo.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "--config-name", "grpo_gsm8k", *sys.argv[1:]]))
