"""ED-GRPO and ED-iDPO as subclasses of TRL's trainers and configs.

    python -m nemo_edo.adapters.trl grpo --config x.yaml    # trl grpo with the term; dpo too

``EDGRPOTrainer`` adds coefficient * E_old[log pi_theta - log pi_old] to any of ``GRPOTrainer``'s losses, over the same
tokens and with the same denominators, from the log-probabilities of TRL's own forward pass. ``EDDPOTrainer`` does so
for ``DPOTrainer``, whose pairs were sampled from the policy as it was before the first step (iterative, online DPO).
"""

import copy
import importlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.utils import gather_object
from packaging.version import Version
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.models.utils import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import selective_log_softmax

from nemo_edo.adapters.exploration_settings import ExplorationSettings, warn_of_untested
from nemo_edo.losses import NgramPaths, PathFunction, novelty_advantages, redundancy_shares

# From here on TRL rescales the tokens of a generation batch to one optimizer step.
TOKENS_OF_ONE_STEP = Version("1.9.1")
SEQUENCE_MEANS = ("grpo", "sapo")
TOKEN_MEANS = ("cispo", "dapo", "vespo")
NO_MODEL_INPUTS = ("completion_mask", "ref_chosen_logps", "ref_rejected_logps")
LOSS_TYPES = (*SEQUENCE_MEANS, *TOKEN_MEANS, "bnpo", "dr_grpo", "luspo")
RECORD = "exploration.json"  # the settings, in each saved folder, which a resume is compared with
PAPER = {
    "title": "Exploration-Driven Optimization for Test-Time Large Language Model Reasoning",
    "citation": """@article{li2026exploration,
    title        = {{Exploration-Driven Optimization for Test-Time Large Language Model Reasoning}},
    author       = {Changhao Li and Yuchen Zhuang and Chenxiao Gao and Haotian Sun and Rushi Qiang and Chao Zhang
                    and Bo Dai},
    year         = 2026,
}""",
}  # fmt: skip
_COEFFICIENT = field(default=None, metadata={"help": "Weight of the exploration term, alpha * beta of the paper."})
_FLOOR = field(default=None, metadata={"help": "Nats below 0: tokens below this log-ratio have no gradient of it."})


@dataclass
class EDGRPOConfig(GRPOConfig):
    """``GRPOConfig`` with the settings of the exploration term (``ExplorationSettings``), of which the coefficient must
    be given, here or to the trainer."""

    exploration_coefficient: float | None = _COEFFICIENT
    log_ratio_floor: float | None = _FLOOR


@dataclass
class EDDPOConfig(DPOConfig):
    """``DPOConfig`` with the settings of ``EDGRPOConfig``."""

    exploration_coefficient: float | None = _COEFFICIENT
    log_ratio_floor: float | None = _FLOOR


_Trainer: Any = Trainer  # TRL, which has no types, adds attributes to it


class _Exploring(_Trainer):
    """Both trainers' handling of the settings: these are in the arguments, in every folder that is saved, and in the
    model card, and a resume with others is refused."""

    exploration: ExplorationSettings
    _record: dict[str, Any]  # the settings, by name

    def _configured(self, args: Any, plain: type, ours: type, coefficient: float | None, floor: float | None) -> Any:
        """A copy of the arguments (None: TRL makes them) with the settings, which may come from both but not differ."""
        warn_of_untested("trl")
        found: dict[str, Any] = {"exploration_coefficient": coefficient, "log_ratio_floor": floor}
        for name, value in found.items():
            stated = getattr(args, name, None)
            if value is not None and stated is not None and value != stated:
                raise ValueError(f"{name} is {value} as an argument and {stated} in args; give one of them")
            found[name] = stated if value is None else value
        if found["exploration_coefficient"] is None:
            raise ValueError(f"exploration_coefficient is missing: give it to {ours.__name__}, or to the trainer")
        self.exploration = ExplorationSettings(*found.values())
        self._record = found
        if args is None:
            return ours(output_dir="trainer_output", **found)
        args = copy.copy(args)
        if type(args) is plain:
            args.__class__ = ours
        for name, value in found.items():
            setattr(args, name, value)
        return args

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """``Trainer.train``. Raises ValueError where the checkpoint was trained with other settings of the term."""
        folder = resume_from_checkpoint or None
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        if folder is not None:
            path = Path(folder) / RECORD
            known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
            if (known or {"exploration_coefficient": 0.0, "log_ratio_floor": None}) != self._record:
                trained = f"{path}: {known}" if known else f"{folder} has no {RECORD}: it was trained without the term"
                raise ValueError(
                    f"{trained}; this trainer has {self._record}. Resume with the same settings, or start another "
                    "training from the checkpoint as its model"
                )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.is_world_process_zero():  # FSDP saves divided states without _save
            self._write_record(Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}")

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        self._write_record(Path(output_dir or self.args.output_dir))

    def _write_record(self, folder: Path) -> None:
        (folder / RECORD).write_text(json.dumps(self._record, indent=2) + "\n", encoding="utf-8")

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            lines = "".join(f"- `{name}`: {value}\n" for name, value in self._record.items())
            with (Path(self.args.output_dir) / "README.md").open("a", encoding="utf-8") as file:
                file.write(f"\n\n## Exploration\n\nTrained with the term of *{PAPER['title']}*:\n\n{lines}")


@dataclass(frozen=True)
class Novelty:
    """Moves ``strength`` of advantage from repeated to rare correct completions of a group (``novelty_advantages``)."""

    strength: float
    paths: PathFunction = field(default_factory=NgramPaths)
    """Which completions took the same path; questions are the prompts' last messages."""
    reward: str | None = None
    """The reward function, by TRL's name for it, that is 1 where a completion is correct. None: the only one."""


class EDGRPOTrainer(_Exploring, GRPOTrainer):
    """``GRPOTrainer`` with the exploration term; with a coefficient of 0 its losses and gradients to the last bit.

    The term is reduced as ``args.loss_type`` says. With vLLM's importance sampling correction its tokens have TRL's
    weights; entropy and off-policy masks, which TRL applies to the surrogate alone, leave it as it is. Logged with
    TRL's metrics, as means over the completion tokens of all processes: ``exploration`` (nats, floored, without the
    coefficient) and ``floor_share``.
    """

    _name, _paper, _tag_names = "ED-GRPO", PAPER, [*GRPOTrainer._tag_names, "ed-grpo"]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *more: Any,
        exploration_coefficient: float | None = None,
        log_ratio_floor: float | None = None,
        novelty: Novelty | None = None,
        **kwargs: Any,
    ) -> None:
        """args: an ``EDGRPOConfig``, or any ``GRPOConfig`` where the next two are given (``ExplorationSettings``).

        Raises ValueError for a schedule with one optimizer step for each generation batch, a loss type that is not in
        ``LOSS_TYPES``, Liger's fused loss, which never shows its log-probabilities, and a novelty reward that TRL does
        not know. Warns of sampling from a cut distribution (``ExplorationSettings.warn_of_cut_sampling``).
        """
        args = self._configured(args, GRPOConfig, EDGRPOConfig, exploration_coefficient, log_ratio_floor)
        super().__init__(model, reward_funcs, args, *more, **kwargs)
        self._logprobs: Tensor | None = None
        self.novelty = novelty
        if novelty is not None:
            names = self.reward_func_names
            correct = names[0] if novelty.reward is None and len(names) == 1 else novelty.reward
            if correct not in names:
                raise ValueError(f"novelty.reward is {correct!r}, expected one of the rewards {', '.join(names)}")
            self._correct_column = names.index(correct)
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type is {self.loss_type!r}, expected one of {', '.join(LOSS_TYPES)}")
        if self.args.use_liger_kernel and hasattr(self, "compute_liger_loss"):
            raise ValueError("use_liger_kernel computes the loss without log-probabilities: set it to False")
        generate_every = self.args.steps_per_generation * self.num_iterations
        aligned = self.args.gradient_accumulation_steps % generate_every == 0  # as TRL asks before it stores pi_old
        self.exploration.require_several_steps(
            1 if aligned else 2,
            f"Set num_iterations (now {self.num_iterations}) or steps_per_generation (now "
            f"{self.args.steps_per_generation}) so that their product exceeds gradient_accumulation_steps (now "
            f"{self.args.gradient_accumulation_steps})",
        )
        self.exploration.warn_of_cut_sampling({**vars(self.args), **(self.args.generation_kwargs or {})})

    def _calculate_rewards(self, inputs: list, prompts: list, completions: list, *args: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, *args)
        self._scored = prompts, completions, rewards  # of this process, and the rewards of all
        return rewards

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.novelty is not None:
            output["advantages"] = self._with_novelty(output["advantages"], self.novelty)
        return output

    def _with_novelty(self, advantages: Tensor, novelty: Novelty) -> Tensor:
        """This process's advantages; its groups may go on in others, so all are gathered."""
        prompts, completions, rewards = self._scored
        questions, texts = (gather_object([_text(x) for x in batch]) for batch in (prompts, completions))
        size = self.num_generations if self.model.training else self.num_generations_eval
        paths = [
            path
            for start in range(0, len(texts), size)
            for path in novelty.paths(questions[start], texts[start : start + size])
        ]
        correct, groups = rewards[:, self._correct_column] == 1, torch.arange(len(texts)) // size
        shares = redundancy_shares(paths, correct, groups)
        everyones = self.accelerator.gather(advantages)
        moved = novelty_advantages(everyones, shares, correct, groups, strength=novelty.strength)
        return moved.split(len(prompts))[self.accelerator.process_index]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        returned = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logprobs = returned[0]
        return returned

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        logprobs, self._logprobs = self._logprobs, None  # no graph is kept alive
        assert logprobs is not None, "TRL's loss has taken its log-probabilities from elsewhere"
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        old_logprobs = inputs.get("old_per_token_logps")
        if old_logprobs is None:  # TRL does without it where the policy is still the sampler
            old_logprobs = logprobs.detach()
        weights = inputs.get("importance_sampling_ratio")  # [B, T], or [B, 1] for whole sequences
        if weights is not None and weights.shape[1] == 1:
            weights = weights.squeeze(1)
        values_BT, sums = self.exploration.term(logprobs, old_logprobs, mask, weights)
        _log_means(self, sums)
        if self.exploration.coefficient == 0:
            return loss
        return loss + self.exploration.coefficient * self._reduced(values_BT, mask, inputs)

    def _reduced(self, values_BT: Tensor, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The mean that ``args.loss_type`` takes of a token loss; values are 0 where the mask is."""
        train = self.model.training
        accumulation = self.current_gradient_accumulation_steps if train else 1
        if self.loss_type in TOKEN_MEANS:
            tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
            if train and Version(trl.__version__) >= TOKENS_OF_ONE_STEP:
                tokens = tokens * accumulation / self.args.steps_per_generation
            return values_BT.sum() / tokens
        if self.loss_type in SEQUENCE_MEANS:
            mean = (values_BT.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
        elif self.loss_type == "bnpo":
            mean = values_BT.sum() / mask.sum().clamp(min=1)
        elif self.loss_type == "dr_grpo":
            mean = values_BT.sum() / (len(values_BT) * self.max_completion_length)
        else:  # luspo: token sums, at either importance sampling level
            mean = values_BT.sum(-1).mean()
        return mean / accumulation


class EDDPOTrainer(_Exploring, DPOTrainer):
    """``DPOTrainer`` with the exploration term of ED-iDPO, over both responses of each pair.

    The pairs must be samples of pi_old, the policy before the first step. TRL's reference model is taken for it unless
    you give it as ``sampler_model``, which costs a second forward pass without gradient. Give it where pi_ref is
    another model, and from the second collection on: without a ``ref_model`` TRL loads the one that the model's config
    names, which is not the model that has been trained. The term is the mean over a batch's responses of their token
    sums; its metrics are those of ``EDGRPOTrainer``. Start a trainer for each collection.
    """

    _name, _paper, _tag_names = "ED-iDPO", PAPER, [*DPOTrainer._tag_names, "ed-idpo"]

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: DPOConfig | None = None,
        *more: Any,
        exploration_coefficient: float | None = None,
        log_ratio_floor: float | None = None,
        sampler_model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """args: an ``EDDPOConfig``, or any ``DPOConfig`` where the next two are given (``ExplorationSettings``).

        Raises ValueError where TRL runs no reference model that could stand for pi_old (``precompute_ref_log_probs``),
        moves it (``sync_ref_model``), hides its log-probabilities (Liger) or has loaded other weights than the model's
        (not looked for under DeepSpeed and FSDP, which divide them); when training starts, for a schedule of
        one optimizer step.
        """
        args = self._configured(args, DPOConfig, EDDPOConfig, exploration_coefficient, log_ratio_floor)
        super().__init__(model, ref_model, args, *more, **kwargs)
        if self.args.use_liger_kernel and hasattr(self, "_compute_loss_liger"):
            raise ValueError("use_liger_kernel computes the loss without log-probabilities: set it to False")
        self.sampler_model = sampler_model
        if sampler_model is not None:  # as TRL prepares its reference
            if self.is_deepspeed_enabled:
                self.sampler_model = prepare_deepspeed(sampler_model, self.accelerator)
            elif self.is_fsdp_enabled:
                self.sampler_model = prepare_fsdp(sampler_model, self.accelerator)
            else:
                self.sampler_model = self.accelerator.prepare_model(sampler_model, evaluation_mode=True)
        else:
            for name in ("precompute_ref_log_probs", "sync_ref_model"):
                if getattr(self.args, name):
                    raise ValueError(f"{name} leaves no frozen pi_old here: set it to False, or give sampler_model")
            divided = self.is_deepspeed_enabled or self.is_fsdp_enabled
            if ref_model is None and self.ref_model is not None and not divided:
                require_same_weights(self.model, self.ref_model)
        self.add_callback(_SeveralSteps(self.exploration))

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        passes: list[Any] = []  # of the policy and then of the reference, for PEFT the same model without its adapter
        models = {id(x): x for x in (self.model, self.ref_model) if x is not None}.values()
        hooks = [x.register_forward_hook(lambda _module, _args, output: passes.append(output)) for x in models]
        try:
            result = super()._compute_loss(model, inputs, return_outputs)
        finally:
            for hook in hooks:
                hook.remove()
        mask = inputs["completion_mask"][:, 1:]
        logprobs = _label_logprobs(passes[0], inputs, mask)
        with torch.no_grad():
            if self.sampler_model is None:
                sampler = passes[1]
            else:
                seen = {name: value for name, value in inputs.items() if name not in NO_MODEL_INPUTS}
                sampler = self.sampler_model(**seen, use_cache=False)
            old_logprobs = _label_logprobs(sampler, inputs, mask)
        values_BT, sums = self.exploration.term(logprobs, old_logprobs, mask)
        _log_means(self, sums)
        if self.exploration.coefficient == 0:
            return result
        term = self.exploration.coefficient * values_BT.sum(-1).mean()
        return (result[0] + term, result[1]) if return_outputs else result + term


def require_same_weights(model: nn.Module, reference: nn.Module) -> None:
    """Raises ValueError where a reference that TRL has loaded, perhaps in another precision, is not the model."""
    for (name, parameter), loaded in zip(model.named_parameters(), reference.parameters(), strict=True):
        own, other = parameter.detach(), loaded.detach().to(parameter.device)
        if not (torch.equal(own.to(other.dtype), other) or torch.equal(own, other.to(own.dtype))):
            raise ValueError(
                f"TRL has loaded the reference by the name in the model's config, and its {name} differs from the "
                "model's, so that it is not pi_old: give ref_model, and the policy that sampled as sampler_model"
            )


class _SeveralSteps(TrainerCallback):  # the number of steps is known when training starts, and not before
    def __init__(self, exploration: ExplorationSettings) -> None:
        self.exploration = exploration

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.exploration.require_several_steps(
            state.max_steps, "Raise num_train_epochs (or max_steps), or lower the batch size"
        )


def _text(message: str | list[dict[str, Any]]) -> str:
    """A prompt or completion, or its last message where it is a conversation."""
    return message if isinstance(message, str) else str(message[-1]["content"])


def _label_logprobs(output: Any, inputs: dict[str, Any], mask: Tensor) -> Tensor:
    """[2B, S - 1] log-probabilities of the next tokens, from TRL's fused head or from logits; 0 where the mask is."""
    if getattr(output, "log_probs", None) is not None:
        return output.log_probs[:, -mask.shape[1] :]
    logprobs = selective_log_softmax(output.logits[:, :-1].float(), inputs["input_ids"][:, 1:])
    return torch.where(mask.bool(), logprobs, 0.0)


def _log_means(trainer: GRPOTrainer | DPOTrainer, sums: Tensor) -> None:
    """Appends means over the tokens of all processes, or nothing where there are none."""
    exploration, below, tokens = trainer.accelerator.reduce(sums, reduction="sum").tolist()
    if tokens:
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]
        metrics["exploration"].append(exploration / tokens)
        metrics["floor_share"].append(below / tokens)


def main(arguments: list[str]) -> None:
    """Runs TRL's script ``grpo`` or ``dpo`` with the classes of this module in the place of TRL's. A YAML file has two
    more keys, ``exploration_coefficient`` and ``log_ratio_floor``; unknown ones are refused."""
    ours = {"grpo": ("GRPO", EDGRPOConfig, EDGRPOTrainer), "dpo": ("DPO", EDDPOConfig, EDDPOTrainer)}
    if not arguments or arguments[0] not in ours:
        sys.exit("usage: python -m nemo_edo.adapters.trl {grpo,dpo} --config FILE.yaml [trl's arguments]")
    name, *rest = arguments
    script = importlib.import_module(f"trl.scripts.{name}")
    method, config, trainer = ours[name]
    for kind, replacement in (("Config", config), ("Trainer", trainer)):
        setattr(trl, method + kind, replacement)
    script.main(*script.make_parser(prog=f"python -m nemo_edo.adapters.trl {name}").parse_args_and_config(rest))


if __name__ == "__main__":
    # By its importable name, and not as __main__: checkpoints name the classes.
    importlib.import_module("nemo_edo.adapters.trl").main(sys.argv[1:])
