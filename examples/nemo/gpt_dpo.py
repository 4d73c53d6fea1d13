"""DPO on given pairs as a NeMo script, as gpt_sft.py. Iterative DPO, which samples its pairs, is gpt_idpo.py.

torchrun --nproc-per-node 8 examples/nemo/gpt_dpo.py model.folder=/models/llama3-8b data.train=/data/pairs.jsonl
"""

import json
from itertools import cycle, islice
from pathlib import Path

import lightning.pytorch as pl
import torch
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager
from omegaconf import DictConfig
from transformers import AutoTokenizer

from nemo_edo.config import IDPOConfig, LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.data.batching import build_batch, epoch_order, minibatches
from nemo_edo.models import MegatronGPTDPOModel
from nemo_edo.models.megatron_gpt_model import model_config


@hydra_runner(config_path="conf", config_name="gpt_dpo")
def main(cfg: DictConfig) -> None:
    settings = model_config(
        cfg.model.folder,
        parallelism=ParallelismConfig(**cfg.model.parallelism),
        precision=PrecisionConfig(**cfg.model.precision),
        lora=LoRAConfig(**cfg.model.lora),
        training=IDPOConfig(),
        seed=cfg.model.seed,
    )
    settings.training = cfg.model.training  # merged with the dataclass by the model class
    trainer = pl.Trainer(**cfg.trainer)
    exp_manager(trainer, cfg.exp_manager)
    model = MegatronGPTDPOModel(settings)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.folder)
    rows = [json.loads(line) for line in Path(cfg.data.train).read_text(encoding="utf-8").splitlines()]
    order = minibatches(epoch_order(len(rows), cfg.model.seed, 0), cfg.data.batch_size)
    batches = [_pairs([rows[row] for row in rows_of_batch], tokenizer) for rows_of_batch in order]
    # The reference is the start, which has not been trained yet. Given pairs have no sampler: alpha has to be 0.
    references = [model.get_inference_log_probs(batch) for batch in batches]
    batches = [
        batch.with_fields(ref_logprobs=reference, old_logprobs=reference)
        for batch, reference in zip(batches, references, strict=True)
    ]
    model.start_training(trainer.max_steps)
    for step, batch in enumerate(islice(cycle(batches), trainer.max_steps)):
        model.prepare_for_training_step()
        loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
        metrics |= model.finish_training_step(loss)
        if torch.distributed.get_rank() == 0:
            print(f"step {step} loss {loss:.4f} grad_norm {metrics['grad_norm']:.3f}")
            for logger in trainer.loggers:
                logger.log_metrics({name: float(value) for name, value in metrics.items()}, step=step)
    if cfg.save_to:
        model.save_to(cfg.save_to)


def _pairs(rows: list[dict], tokenizer):
    """A chosen and a rejected response of each prompt, in neighbouring rows of a batch."""
    ids = []
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        for name in ("chosen", "rejected"):
            response = tokenizer(row[name], add_special_tokens=False)["input_ids"]
            ids.append((prompt, [*response, tokenizer.eos_token_id]))
    roles = torch.tensor([1, -1] * len(rows))
    batch = build_batch(ids, pad_id=tokenizer.eos_token_id)
    return batch.with_fields(pair_role=roles, exploration_factors=torch.zeros(len(ids)))


if __name__ == "__main__":
    main()
