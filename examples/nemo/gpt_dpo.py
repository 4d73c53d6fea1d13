"""DPO on given pairs as a NeMo script, as gpt_sft.py. Iterative DPO, which samples its pairs, is gpt_idpo.py.

torchrun --nproc-per-node 8 examples/nemo/gpt_dpo.py model.folder=/models/llama3-8b data.train=/data/pairs.jsonl
"""

import json
from pathlib import Path

import torch
from nemo.core.config import hydra_runner
from omegaconf import DictConfig
from training import build, train
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nemo_edo.data.batching import build_batch, epoch_order, minibatches
from nemo_edo.models import MegatronGPTDPOModel
from nemo_edo.types import TrainingBatch


@hydra_runner(config_path="conf", config_name="gpt_dpo")
def main(cfg: DictConfig) -> None:
    model, tokenizer = build(MegatronGPTDPOModel, cfg), AutoTokenizer.from_pretrained(cfg.model.folder)
    pairs = [json.loads(line) for line in Path(cfg.data.train).read_text(encoding="utf-8").splitlines()]
    batches = []
    for places in minibatches(epoch_order(len(pairs), cfg.model.seed, 0), cfg.data.batch_size):
        batch = in_neighbouring_rows([pairs[place] for place in places], tokenizer)
        # The reference is the start, which has not been trained yet. Given pairs have no sampler: alpha has to be 0.
        reference = model.get_inference_log_probs(batch)
        batches.append(batch.with_fields(ref_logprobs=reference, old_logprobs=reference))
    train(model, batches, cfg)


def in_neighbouring_rows(pairs: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> TrainingBatch:
    """A chosen and a rejected response of each prompt."""
    ids = []
    for pair in pairs:
        prompt = tokenizer(pair["prompt"])["input_ids"]
        for name in ("chosen", "rejected"):
            response = tokenizer(pair[name], add_special_tokens=False)["input_ids"]
            ids.append((prompt, [*response, tokenizer.eos_token_id]))
    roles, unexplored = torch.tensor([1, -1] * len(pairs)), torch.zeros(len(ids))
    batch = build_batch(ids, pad_id=tokenizer.eos_token_id)
    return batch.with_fields(pair_role=roles, exploration_factors=unexplored)


if __name__ == "__main__":
    main()
