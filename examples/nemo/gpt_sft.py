"""Supervised fine-tuning as a NeMo script: hydra_runner, exp_manager, a model class, and the loop of training.py.

torchrun --nproc-per-node 8 examples/nemo/gpt_sft.py model.folder=/models/llama3-8b data.train=/data/sft.jsonl
"""

import json
from pathlib import Path

from nemo.core.config import hydra_runner
from omegaconf import DictConfig
from training import build, train
from transformers import AutoTokenizer

from nemo_edo.data.batching import build_batch, epoch_order, minibatches
from nemo_edo.models import MegatronGPTSFTModel


@hydra_runner(config_path="conf", config_name="gpt_sft")
def main(cfg: DictConfig) -> None:
    model, tokenizer = build(MegatronGPTSFTModel, cfg), AutoTokenizer.from_pretrained(cfg.model.folder)
    rows = [json.loads(line) for line in Path(cfg.data.train).read_text(encoding="utf-8").splitlines()]
    ids = []
    for row in rows:
        response = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
        ids.append((tokenizer(row["prompt"])["input_ids"], [*response, tokenizer.eos_token_id]))
    order = minibatches(epoch_order(len(ids), cfg.model.seed, 0), cfg.data.batch_size)
    batches = [build_batch([ids[place] for place in places], pad_id=tokenizer.eos_token_id) for places in order]
    train(model, batches, cfg)


if __name__ == "__main__":
    main()
