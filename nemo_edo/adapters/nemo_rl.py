"""ED-GRPO in NeMo-RL: ``EDGRPOLossFn``, and a launcher, because NeMo-RL's ``setup`` names its own loss.

    python -m nemo_edo.adapters.nemo_rl examples/run_grpo.py --config ... \\
        +loss_fn.exploration_coefficient=0.01 +loss_fn.log_ratio_floor=-0.1

runs NeMo-RL's script with ``EDGRPOLossFn`` in the place of ``ClippedPGLossFn``. Ray's workers unpickle the loss, so
this package must be importable in their environments too.
"""

import ast
import importlib
import re
import runpy
import sys
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from nemo_rl.algorithms.loss.interfaces import LossType
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl.algorithms.utils import masked_mean
from torch import Tensor

from nemo_edo.adapters.exploration_settings import ExplorationSettings, refuse_near_misses, warn_of_untested


class EDGRPOLossFn(ClippedPGLossFn):
    """NeMo-RL's loss plus coefficient * E_old[log pi_theta - log pi_old], over the same tokens and global counts.

    With a coefficient of 0, NeMo-RL's loss to the last bit. Where ``use_importance_sampling_correction`` is on, the
    term's tokens have the loss's weights. Metrics: ``exploration`` (mean over tokens in nats, floored, without the
    coefficient) and ``floor_share``.
    """

    def __init__(self, cfg: ClippedPGLossConfig, *args: Any, **kwargs: Any) -> None:
        """cfg: the ``loss_fn`` with ``exploration_coefficient`` and ``log_ratio_floor`` (``ExplorationSettings``).
        Raises ValueError without a coefficient, and with ``force_on_policy_ratio``, which has no policy to leave."""
        warn_of_untested("nemo-rl")
        super().__init__(cfg, *args, **kwargs)
        self.exploration = exploration_of(cfg)
        if self.force_on_policy_ratio:
            self.exploration.require_several_steps(1, "Set loss_fn.force_on_policy_ratio to false")
        if hasattr(self, "metric_normalizations"):  # after 0.7: what each metric is divided by
            of_tokens = self.metric_normalizations["probs_ratio"]
            self.metric_normalizations |= {"exploration": of_tokens, "floor_share": of_tokens}

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        loss, metrics = super().__call__(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        old_logprobs = next_token_logprobs if self.force_on_policy_ratio else data["prev_logprobs"][:, 1:]
        weights = self._weights(data, mask) if self.use_importance_sampling_correction else None
        values_BT, sums = self.exploration.term(next_token_logprobs, old_logprobs, mask, weights)
        total, below, _ = sums.tolist()
        tokens = float(global_valid_toks) + 1e-8  # as NeMo-RL's own
        metrics |= {"exploration": total / tokens, "floor_share": below / tokens, "loss": loss.item()}
        if self.exploration.coefficient == 0:
            return loss, metrics
        if self.loss_type == LossType.TOKEN_LEVEL:
            term = masked_mean(values_BT, mask, global_normalization_factor=global_valid_toks)
        else:
            rows_B = masked_mean(values_BT, data["token_mask"][:, 1:], dim=-1)
            term = masked_mean(rows_B, data["sample_mask"], global_normalization_factor=global_valid_seqs)
        loss = loss + self.exploration.coefficient * term
        return loss, metrics | {"loss": loss.item()}

    @torch.no_grad()
    def _weights(self, data: Any, mask: Tensor) -> Tensor:
        """[B, T], pi_old / pi_gen as NeMo-RL bounds it. With ratios of sequences the weight is the whole response's."""
        log_ratio = data["prev_logprobs"][:, 1:] - data["generation_logprobs"][:, 1:]
        if self.sequence_level_importance_ratios:
            log_ratio = (log_ratio * mask).sum(dim=-1, keepdim=True).expand_as(log_ratio)
        ratio = torch.nan_to_num(log_ratio.exp(), nan=0.0, posinf=0.0, neginf=0.0)
        kind, high = self.truncated_importance_sampling_type, self.truncated_importance_sampling_ratio
        low = self.truncated_importance_sampling_ratio_min
        if high is None:
            return ratio
        if kind == "tis":
            return ratio.clamp(min=low or 0.0, max=high)
        if kind == "icepop":
            return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
        clean = torch.nan_to_num(log_ratio, nan=0.0, posinf=0.0, neginf=0.0)  # seq-mask-tis: by the geometric mean
        mean_B = masked_mean(clean, data["token_mask"][:, 1:], dim=-1).exp()
        return ratio * ((mean_B >= low) & (mean_B <= high))[:, None]


def exploration_of(cfg: ClippedPGLossConfig) -> ExplorationSettings:
    """The settings in ``loss_fn``. Raises ValueError where the coefficient is missing, a value is refused, or another
    key looks like one of them: NeMo-RL keeps keys that it does not know."""
    keys = frozenset(cfg if isinstance(cfg, Mapping) else getattr(cfg, "model_extra", None) or vars(cfg))
    refuse_near_misses(keys, "loss_fn.")
    coefficient = _field(cfg, "exploration_coefficient")
    if coefficient is None:
        raise ValueError("loss_fn.exploration_coefficient is missing: add +loss_fn.exploration_coefficient=0.01")
    return ExplorationSettings(coefficient, _field(cfg, "log_ratio_floor"))


def check_schedule(master_config: Any) -> None:
    """Raises ValueError for a config with one optimizer step for each collection."""
    grpo, policy = _field(master_config, "grpo"), _field(master_config, "policy")
    samples = _field(grpo, "num_prompts_per_step") * _field(grpo, "num_generations_per_prompt")
    batch = _field(policy, "train_global_batch_size")
    exploration_of(_field(master_config, "loss_fn")).require_several_steps(
        samples / batch,
        f"Set policy.train_global_batch_size (now {batch}) below grpo.num_prompts_per_step x "
        f"grpo.num_generations_per_prompt (now {samples})",
    )


def _field(config: Any, name: str) -> Any:
    """None where it is missing. NeMo-RL 0.6 has dictionaries, later versions make models of more and more of them."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def install() -> None:
    """Puts ``EDGRPOLossFn`` where ``setup`` of GRPO makes its loss, and has it check the schedule first. Wherever else
    NeMo-RL makes its own loss, it raises ValueError: that would train without the term."""
    grpo: Any = importlib.import_module("nemo_rl.algorithms.grpo")
    setup, make = grpo.setup, ClippedPGLossFn.__init__

    @wraps(make)
    def refuse_stock(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is ClippedPGLossFn:
            raise ValueError(f"NeMo-RL makes its own loss here, without the exploration term: {ONLY_GRPO}")
        make(self, *args, **kwargs)

    def setup_after_check(master_config: Any, *args: Any, **kwargs: Any) -> Any:
        check_schedule(master_config)
        return setup(master_config, *args, **kwargs)

    ClippedPGLossFn.__init__ = refuse_stock  # type: ignore[method-assign]
    grpo.ClippedPGLossFn = EDGRPOLossFn
    grpo.setup = setup_after_check


ONLY_GRPO = "the launcher serves scripts that use setup of nemo_rl.algorithms.grpo, not PPO and the single controller"


def main(arguments: list[str]) -> None:
    """Runs one of NeMo-RL's scripts, with its arguments, after ``install``. Exits with a message without a script, and
    for one whose loss the launcher cannot replace."""
    if not arguments:
        sys.exit("usage: python -m nemo_edo.adapters.nemo_rl examples/run_grpo.py [its arguments]")
    # A script whose loss cannot be replaced is refused before it loads anything, by what it imports: the single
    # controller makes its loss in another process.
    script = arguments[0]
    imported: set[str] = set()
    for node in ast.walk(ast.parse(Path(script).read_text(encoding="utf-8"), script)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imported |= {f"{module}{name.name}" for name in node.names}
    others = sorted(one for one in imported if re.search(r"single_controller|algorithms\.ppo", one))
    if others or not imported & {"nemo_rl.algorithms.grpo", "nemo_rl.algorithms.grpo.setup"}:
        found = f"it imports {others[0]}" if others else "it does not import that"
        sys.exit(f"{script}: {ONLY_GRPO}; {found}. It would train without the exploration term")
    # By its importable name, and not as __main__: Ray's workers must find the class of the loss.
    importlib.import_module("nemo_edo.adapters.nemo_rl").install()
    sys.argv = arguments
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
