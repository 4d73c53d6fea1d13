"""Runs TRL's trainers on given tensors: python trl_losses.py CASES.pt RESULTS.pt, in the environment that has TRL.

CASES.pt: {name: {"kind": a key of KINDS, "settings": fields of TRL's config, "tensors": float32 unless said}}.
RESULTS.pt: {name: {"loss": scalar, "<tensor>": the loss's gradient for it, and what the kind adds}}.

The trainers are made without their ``__init__``, which wants models and data sets; the settings pass through TRL's own
config classes, and the losses are the trainers' own methods. Models are stand-ins that return the given tensors.
"""

import sys
import tempfile
from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import Tensor
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.experimental.xpo import XPOConfig, XPOTrainer


def _everything(x: Tensor) -> Tensor:
    return x


ONE_PROCESS = SimpleNamespace(
    device=torch.device("cpu"), num_processes=1, process_index=0, gather=_everything, gather_for_metrics=_everything
)


def trainer_of(trainer_class: type, config_class: type, settings: dict, **attributes: object) -> object:
    """A trainer with the settings as TRL's ``__init__`` takes them over, most of them under the config's names."""
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(output_dir=folder, report_to=[], use_cpu=True, bf16=False, **settings)
    trainer = trainer_class.__new__(trainer_class)
    names = {"accelerator": ONE_PROCESS, "_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0}
    trainer.__dict__.update({**vars(args), "args": args, **names, **attributes})
    return trainer


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def differentiated(loss: Tensor, **leaves: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"loss": loss.detach(), **dict(zip(leaves, gradients, strict=True))}


def grpo(settings: dict, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """From rewards and log-probabilities [B, T] to the loss: advantages, importance ratios, then ``_compute_loss``.

    ``sampler``, where it is given, is what vLLM would have reported.
    """
    with_sampler = "sampler" in tensors
    model, frozen, ref_model = (SimpleNamespace(training=True, is_gradient_checkpointing=False) for _ in range(3))
    logprobs, lengths = leaf(tensors["logprobs"]), tensors["lengths"].tolist()
    returned = {id(model): tensors["old"], id(ref_model): tensors["ref"], id(frozen): logprobs}
    trainer = trainer_of(
        GRPOTrainer, GRPOConfig, {"per_device_train_batch_size": len(lengths), "steps_per_generation": 2, **settings},
        model=model, ref_model=ref_model, environments=None, tools=None, current_gradient_accumulation_steps=1,
        use_vllm=with_sampler,  # not through the config, which would look for vLLM
        epsilon_low=settings.get("epsilon", 0.2),
        epsilon_high=settings.get("epsilon_high", settings.get("epsilon", 0.2)),
        reward_weights=torch.ones(1), reward_func_names=["reward"], _pending_extra_logs={}, _pending_metrics={},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
    )  # fmt: skip
    ids = [[1] * length for length in lengths]
    sampler = [row[:n].tolist() for row, n in zip(tensors["sampler"], lengths, strict=True)] if with_sampler else None
    trainer._generate = lambda prompts: (ids, ids, None, ids, torch.tensor(sum(lengths)), sampler, {}, None, None)
    trainer._calculate_rewards = lambda *_: tensors["rewards"][:, None]
    trainer._get_per_token_logps_and_entropies = lambda policy, *_, **__: (returned[id(policy)], torch.zeros(1, 1))
    batch = trainer._generate_and_score_completions([{"prompt": "x"}] * len(lengths))
    loss = trainer._compute_loss(frozen, batch)
    return {**differentiated(loss, logprobs=logprobs), "advantages": batch["advantages"]}


def dpo(settings: dict, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits [2P, S, V] for tokens [2P, S], chosen rows first; ``completion_mask`` [2P, S] marks responses."""
    logits = leaf(tensors["logits"])
    trainer = trainer_of(
        DPOTrainer, DPOConfig, settings, model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        ref_model=lambda **_: SimpleNamespace(logits=tensors["ref_logits"]), precompute_ref_logps=False,
        loss_types=settings["loss_type"], loss_weights=[1.0],
    )  # fmt: skip
    masks = {name: tensors[name] for name in ("attention_mask", "completion_mask")}
    inputs = {"input_ids": tensors["tokens"], **masks}
    loss = trainer._compute_loss(lambda **_: SimpleNamespace(logits=logits), inputs, return_outputs=False)
    return differentiated(loss, logits=logits)


def xpo(settings: dict, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits [2P, S, V] of both models for tokens [2P, S]: P responses of the policy, then P of the reference model to
    the same prompts. ``chosen`` [P] bool: the policy's response won."""
    logits, prompt = leaf(tensors["logits"]), int(tensors["completion_mask"][0].argmax())
    data = {"input_ids": tensors["tokens"], "attention_mask": tensors["attention_mask"]}
    of_policy, of_reference = ({name: x.chunk(2)[half] for name, x in data.items()} for half in (0, 1))

    def model_of(all_logits: Tensor) -> object:
        halves = all_logits.chunk(2)
        return lambda ids, **_: SimpleNamespace(logits=halves[0 if ids is of_policy["input_ids"] else 1])

    trainer = trainer_of(XPOTrainer, XPOConfig, settings, ref_model=model_of(tensors["ref_logits"]))
    trainer._beta, trainer._alpha = trainer.args.beta, trainer.args.alpha
    logprobs = trainer._compute_logprobs(model_of(logits), of_policy, of_reference, prompt)
    loss, _, _ = trainer._compute_losses(*logprobs, tensors["chosen"])
    return differentiated(loss, logits=logits)


KINDS = {"grpo": grpo, "dpo": dpo, "xpo": xpo}


def main(cases: str, results: str) -> None:
    loaded = torch.load(cases, weights_only=True)
    torch.save({name: KINDS[case["kind"]](case["settings"], case["tensors"]) for name, case in loaded.items()}, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
