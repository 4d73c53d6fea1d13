"""Trains tiny Llamas with TRL's trainers and with nemo_edo's, in an environment that has TRL.

python trl_trainers.py GRPO_LOSS_TYPES RESULTS.pt, alone or under torchrun (gloo); the main process writes
{"grpo": {loss type: ...}, "dpo": ...}: weights after a few steps, losses and gradients of one batch, TRL's logs.
Run alone, it also runs the example of docs/trainers.md.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from nemo_edo.adapters import trl as adapter
from nemo_edo.adapters.trl import EDDPOTrainer, EDGRPOConfig, EDGRPOTrainer, Novelty, require_same_weights
from nemo_edo.losses import each_path

COEFFICIENT = 0.3
WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijk"]
# vespo and cispo have their own idea of a clip; luspo is meant for sequence-level ratios.
OF_LOSS_TYPE = {"cispo": {"epsilon_high": 5.0}, "luspo": {"importance_sampling_level": "sequence"}}
TINY = LlamaConfig(
    vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=32, initializer_range=0.4, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


@cache
def model_folder() -> str:
    """TRL loads the reference model from where the policy is stored."""
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(TINY).save_pretrained(folder)
    return folder


def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model_folder())


def flat(tensors) -> Tensor:
    return torch.cat([x.detach().flatten() for x in tensors])


def letters(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """A reward that differs within groups."""
    return [float(len(set(completion.split()))) for completion in completions]


# --- GRPO ----------------------------------------------------------------------------------------------------------


def grpo_trainer(
    trainer_class: type[GRPOTrainer], loss_type: str, settings: dict, rewards: object = letters, **ours: object
) -> GRPOTrainer:
    """Two optimizer steps of two micro-batches for each collection of eight responses, most of them truncated."""
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=True, bf16=False, seed=0, save_strategy="no",
        logging_steps=1, disable_tqdm=True, learning_rate=1e-2, gradient_checkpointing=False,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_completion_length=6, loss_type=loss_type,
        **{
            "num_generations": 2, "mask_truncated_completions": True, "max_steps": 4, "steps_per_generation": 4,
            **OF_LOSS_TYPE.get(loss_type, {}), **settings,
        },
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": f"{a} {b}"} for a in "abcd" for b in "efgh"])
    return trainer_class(
        model=model(), args=args, reward_funcs=rewards, train_dataset=prompts, processing_class=tokenizer(), **ours
    )


class ProbedTrainer(EDGRPOTrainer):
    """Stores what the first off-policy batch with a token gives under several losses."""

    probe: dict | None = None
    masked_micro_batches = 0

    def _compute_loss(self, policy: torch.nn.Module, inputs: dict) -> Tensor:
        mask = inputs["completion_mask"]
        self.masked_micro_batches += int(mask.sum() == 0)
        has_tokens = self.accelerator.gather(mask.sum()[None])[0] > 0  # every process does as the main one
        if self.probe is None and self.state.global_step % 2 == 1 and has_tokens:
            probe = self.probed(policy, inputs)
            moved = torch.where(mask.bool(), probe["logprobs"] - probe["old"], 0.0).abs().max()
            self.probe = probe if self.accelerator.gather(moved[None])[0] > 1e-3 else None
        return super()._compute_loss(policy, inputs)

    def probed(self, policy: torch.nn.Module, inputs: dict) -> dict:
        parameters = list(self.accelerator.unwrap_model(policy).parameters())

        def differentiated(compute: Callable, given: dict) -> tuple[Tensor, Tensor]:
            loss = compute(self.accelerator.unwrap_model(policy), given)
            return loss.detach(), flat(torch.autograd.grad(loss, parameters))

        stock = super()._compute_loss
        neutral = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        # On-policy with advantages of -1 TRL's own gradient is that of the log-probabilities under its denominators.
        minus_one = {**inputs, "advantages": -torch.ones_like(inputs["advantages"]), "old_per_token_logps": None}
        base, base_gradient = differentiated(GRPOTrainer._compute_loss.__get__(self), neutral)
        total, gradient = differentiated(stock, neutral)
        _, expected = differentiated(GRPOTrainer._compute_loss.__get__(self), minus_one)
        with torch.no_grad():
            GRPOTrainer._compute_loss(self, self.accelerator.unwrap_model(policy), inputs)
        return {
            "added": (total - base) / COEFFICIENT, "added_gradient": (gradient - base_gradient) / COEFFICIENT,
            "gradient_of_trl": expected, "logprobs": self._logprobs, "old": inputs["old_per_token_logps"],
            "mask": inputs["completion_mask"], "num_items": inputs["num_items_in_batch"],
            "processes": self.accelerator.num_processes,
        }  # fmt: skip


class NoveltyTrainer(EDGRPOTrainer):
    """Stores each collection's advantages before and after, and what they follow from; of one process."""

    seen: list[dict]

    def _with_novelty(self, advantages: Tensor, novelty: Novelty) -> Tensor:
        moved = super()._with_novelty(advantages, novelty)
        _, completions, rewards = self._scored
        first = self.accelerator.process_index * len(completions)
        paths = torch.tensor([WORDS.index(text.split()[0]) if text.split() else -1 for text in completions])
        correct = rewards[first : first + len(completions), 1] == 1
        self.seen.append({"before": advantages, "after": moved, "paths": paths, "correct": correct})
        return moved


def without_a(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """What counts as correct, here."""
    return [float("a" not in completion.split()) for completion in completions]


def novelty() -> list[dict]:
    first_word = each_path(lambda question, text: text.split()[0] if text.split() else None)
    settings = {"num_generations": 4, "mask_truncated_completions": False}
    trainer = grpo_trainer(
        NoveltyTrainer, "grpo", settings, rewards=[letters, without_a], exploration_coefficient=0.0,
        novelty=Novelty(strength=0.5, paths=first_word, reward="without_a"),
    )  # fmt: skip
    trainer.seen = []
    trainer.train()
    return trainer.seen


def trained(trainer: GRPOTrainer | DPOTrainer) -> dict:
    trainer.train()
    steps = trainer.state.log_history[: trainer.args.max_steps]
    logs = [{k: v for k, v in line.items() if "time" not in k} for line in steps]
    return {"weights": flat(trainer.accelerator.unwrap_model(trainer.model).parameters()), "logs": logs}


def grpo(loss_type: str) -> dict:
    with_kl = {"beta": 0.04}
    probed = grpo_trainer(ProbedTrainer, loss_type, {}, exploration_coefficient=COEFFICIENT)
    return {
        "stock": trained(grpo_trainer(GRPOTrainer, loss_type, with_kl)),
        "zero": trained(grpo_trainer(EDGRPOTrainer, loss_type, with_kl, exploration_coefficient=0.0)),
        "explored": trained(probed),
        "probe": probed.probe,
        "masked_micro_batches": probed.masked_micro_batches,
    }


def refused_schedule() -> str:
    try:
        grpo_trainer(EDGRPOTrainer, "grpo", {"steps_per_generation": 2}, exploration_coefficient=COEFFICIENT)
    except ValueError as error:
        return str(error)
    return ""


def by_command() -> dict:
    """``python -m nemo_edo.adapters.trl grpo`` with a YAML file, then resumed with the same and another coefficient."""
    os.chdir(tempfile.mkdtemp())
    model().save_pretrained("model")
    tokenizer().save_pretrained("model")
    Dataset.from_list([{"prompt": f"{a} {b}"} for a in "abcd" for b in "efgh"]).to_json("data/train.jsonl")
    settings = {
        "model_name_or_path": "model", "dataset_name": "data", "reward_funcs": ["trl_trainers.letters"],
        "output_dir": "out", "max_steps": 4, "num_generations": 2, "num_iterations": 2, "max_completion_length": 4,
        "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False, "report_to": "none", "save_steps": 2,
        "gradient_checkpointing": False, "exploration_coefficient": 0.1, "log_ratio_floor": -0.5,
    }  # fmt: skip
    Path("x.yaml").write_text(json.dumps(settings))  # JSON is YAML
    Path("misspelled.yaml").write_text(json.dumps({**settings, "log_ratio_flor": -1}))
    resume = ["--config", "x.yaml", "--resume_from_checkpoint", "out/checkpoint-2"]
    runs = {"first": ["--config", "x.yaml"], "same": resume, "other": [*resume, "--exploration_coefficient", "0.2"],
            "misspelled": ["--config", "misspelled.yaml"]}  # fmt: skip
    said = {}
    for name, arguments in runs.items():
        try:
            adapter.main(["grpo", *arguments])
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)
    trainer = grpo_trainer(EDGRPOTrainer, "grpo", {}, exploration_coefficient=0.1)
    trainer.create_model_card("name")
    card = (Path(trainer.args.output_dir) / "README.md").read_text()
    kept = json.loads(Path("out/checkpoint-2/exploration.json").read_text())
    return {**said, "kept": kept, "card": card, "args": str(trainer.args.to_dict()["exploration_coefficient"])}


# --- DPO -----------------------------------------------------------------------------------------------------------


def dpo_trainer(trainer_class: type[DPOTrainer], max_steps: int = 8, **ours: object) -> DPOTrainer:
    args = DPOConfig(
        output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=True, bf16=False, seed=0, save_strategy="no",
        logging_steps=1, disable_tqdm=True, learning_rate=1e-2, max_steps=max_steps, gradient_checkpointing=False,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, beta=0.1,
    )  # fmt: skip
    pairs = [{"prompt": f"{a} {b}", "chosen": " c c d", "rejected": " e"} for a in "abcd" for b in "efgh"]
    return trainer_class(
        model=model(), ref_model=model(), args=args, train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer(), **ours,
    )  # fmt: skip


def dpo() -> dict:
    explored = {"exploration_coefficient": COEFFICIENT, "log_ratio_floor": -0.5}
    trainer = dpo_trainer(EDDPOTrainer, **explored)
    result = {
        "stock": trained(dpo_trainer(DPOTrainer)),
        "zero": trained(dpo_trainer(EDDPOTrainer, exploration_coefficient=0.0)),
        "explored": trained(trainer),
        "sampler_given": trained(dpo_trainer(EDDPOTrainer, **explored, sampler_model=model())),
    }
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    losses = [compute(trainer, trainer.model, batch, False) for compute in (DPOTrainer._compute_loss,
                                                                           EDDPOTrainer._compute_loss)]  # fmt: skip
    with torch.no_grad():
        logits = [
            policy(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            for policy in (trainer.accelerator.unwrap_model(trainer.model), model())
        ]
    result["added"] = (losses[1] - losses[0]).detach() / COEFFICIENT
    result["batch"] = {"ids": batch["input_ids"], "mask": batch["completion_mask"], "logits": logits}
    try:
        dpo_trainer(EDDPOTrainer, max_steps=1, **explored).train()
    except ValueError as error:
        result["refused"] = str(error)
    other = model()
    require_same_weights(model(), other.bfloat16())
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    try:
        require_same_weights(model(), other)
    except ValueError as error:
        result["other reference"] = str(error)
    return result


def example_of_the_docs() -> list[str]:
    """The metrics that the page's Python logs, with a tiny model under the name that it loads, on the CPU."""
    page = (Path(__file__).parents[3] / "docs" / "trainers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    [code] = [block for block in blocks if "adapters.trl" in block]
    [name] = re.findall(r'model="(.*?)"', code)
    os.chdir(tempfile.mkdtemp())
    model().save_pretrained(name)
    tokenizer().save_pretrained(name)
    here = {"use_cpu": True, "bf16": False, "report_to": [], "max_steps": 4, "max_completion_length": 4,
            "logging_steps": 1, "save_strategy": "no", "gradient_checkpointing": False}  # fmt: skip
    adapter.EDGRPOConfig = partial(EDGRPOConfig, **here)
    found = {}
    exec(code, found)
    adapter.EDGRPOConfig = EDGRPOConfig
    return sorted(set().union(*found["trainer"].state.log_history))


def main(loss_types: str, results: str) -> None:
    alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
    output = {"grpo": {name: grpo(name) for name in loss_types.split(",")}, "novelty": novelty()}
    if alone:
        output |= {"dpo": dpo(), "refused": refused_schedule(), "example": example_of_the_docs()}
        output["command"] = by_command()
    if int(os.environ.get("RANK", 0)) == 0:
        torch.save(output, Path(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
