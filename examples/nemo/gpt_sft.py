"""Supervised fine-tuning as a NeMo script: hydra_runner, exp_manager, a model class, and a loop in sight.

torchrun --nproc-per-node 8 examples/nemo/gpt_sft.py model.folder=/models/llama3-8b data.train=/data/sft.jsonl
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

from nemo_edo.config import LoRAConfig, ParallelismConfig, PrecisionConfig, SFTConfig
from nemo_edo.data.batching import build_batch, epoch_order, minibatches
from nemo_edo.models import MegatronGPTSFTModel
from nemo_edo.models.megatron_gpt_model import model_config


@hydra_runner(config_path="conf", config_name="gpt_sft")
def main(cfg: DictConfig) -> None:
    settings = model_config(
        cfg.model.folder,
        parallelism=ParallelismConfig(**cfg.model.parallelism),
        precision=PrecisionConfig(**cfg.model.precision),
        lora=LoRAConfig(**cfg.model.lora),
        training=SFTConfig(),
        seed=cfg.model.seed,
    )
    settings.training = cfg.model.training  # merged with the dataclass by the model class
    trainer = pl.Trainer(**cfg.trainer)
    exp_manager(trainer, cfg.exp_manager)
    model = MegatronGPTSFTModel(settings)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.folder)
    rows = [json.loads(line) for line in Path(cfg.data.train).read_text(encoding="utf-8").splitlines()]
    ids = [
        (tokenizer(row["prompt"])["input_ids"], [*_plain(tokenizer, row["response"]), tokenizer.eos_token_id])
        for row in rows
    ]
    # The same global batches on every rank: the model takes its share.
    order = minibatches(epoch_order(len(ids), cfg.model.seed, 0), cfg.data.batch_size)
    model.start_training(trainer.max_steps)
    for step, rows_of_batch in enumerate(islice(cycle(order), trainer.max_steps)):
        batch = build_batch([ids[row] for row in rows_of_batch], pad_id=tokenizer.eos_token_id)
        model.prepare_for_training_step()
        loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
        metrics |= model.finish_training_step(loss)
        if torch.distributed.get_rank() == 0:
            print(f"step {step} loss {loss:.4f} grad_norm {metrics['grad_norm']:.3f}")
            for logger in trainer.loggers:
                logger.log_metrics({name: float(value) for name, value in metrics.items()}, step=step)
    if cfg.save_to:
        model.save_to(cfg.save_to)


def _plain(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


if __name__ == "__main__":
    main()
