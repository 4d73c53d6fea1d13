"""Runs verl with nemo_edo's plugin, in an environment that has verl: python verl_losses.py RESULTS.pt."""

import sys
import warnings
from functools import cache

import numpy as np
import torch
import verl  # noqa: F401  (which loads its plugins)
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict

found = [name for name in sys.modules if name.startswith("nemo_edo.adapters")]  # before anything else is imported

from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_adv_estimator_fn  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass, validate_config  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402

COEFFICIENT, FLOOR = 0.3, -0.2
ACTOR = "actor_rollout_ref.actor"
EXPLORED = [
    f"{ACTOR}.policy_loss.loss_mode=ed_grpo",
    f"{ACTOR}.policy_loss._target_=nemo_edo.adapters.verl.EDGRPOPolicyLossConfig",
    f"+{ACTOR}.policy_loss.exploration_coefficient={COEFFICIENT}",
]
ZERO = [*EXPLORED[:2], f"+{ACTOR}.policy_loss.exploration_coefficient=0"]
FLOORED = f"+{ACTOR}.policy_loss.log_ratio_floor={FLOOR}"
AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
PROMPT, LENGTHS, TOKENS = 2, [4, 2, 3, 1], 4


@cache
def composed(*overrides: str) -> DictConfig:
    """verl's own config of its PPO trainer."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", "+async_training=null", *overrides])


def batch(masked: bool) -> TensorDict:
    """What an actor's worker gets: four sequences without padding, weights of a rollout correction."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(4, TOKENS) if masked else (torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]).float()
    attention = (torch.arange(PROMPT + TOKENS) < PROMPT + torch.tensor(LENGTHS)[:, None]).long()
    data = TensorDict(
        {
            "prompts": torch.ones(4, PROMPT, dtype=torch.long), "responses": torch.ones(4, TOKENS, dtype=torch.long),
            "attention_mask": attention, "response_mask": mask,
            "old_log_probs": -torch.rand(4, TOKENS, generator=generator),
            "advantages": torch.randn(4, TOKENS, generator=generator),
            "rollout_is_weights": torch.rand(4, TOKENS, generator=generator),
        }, [4],
    )  # fmt: skip
    # Twice this micro-batch's rows and tokens: it is one of two.
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=2 * sum(LENGTHS), global_batch_size=8)
    return data


def loss_of(*overrides: str, mode: str = "token-mean", masked: bool = False) -> dict:
    """verl's ``ppo_loss``, as its workers call it, on the log-probabilities of packed sequences."""
    changed = OmegaConf.merge(composed(*overrides).actor_rollout_ref.actor, {"loss_agg_mode": mode})
    actor = omega_conf_to_dataclass(changed)
    logprobs = -torch.rand(sum(LENGTHS) + 4 * PROMPT, generator=torch.Generator().manual_seed(1))
    logprobs.requires_grad_()
    loss, metrics = ppo_loss(actor, {"log_probs": logprobs}, batch(masked))
    [gradient] = torch.autograd.grad(loss, logprobs)
    named = {name: float(getattr(value, "values", [value])[0]) for name, value in metrics.items()}
    return {"loss": loss.detach(), "gradient": gradient, "metrics": named, "logprobs": logprobs.detach()}


def with_base(name: str) -> dict:
    """verl's loss of that name, and what the term adds to it."""
    stock = loss_of(f"{ACTOR}.policy_loss.loss_mode={name}")["loss"]
    return {"stock": stock, "added": loss_of(*EXPLORED, f"+{ACTOR}.policy_loss.base_loss={name}")["loss"] - stock}


def refusal(*overrides: str) -> str:
    try:
        validate_config(composed(*overrides), use_reference_policy=False, use_critic=False)
    except (ValueError, InstantiationException) as error:  # Hydra wraps what a config's class raises
        return str(error)
    return ""


def warnings_of(*overrides: str) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert refusal(*overrides) == ""
    return "; ".join(str(one.message) for one in caught if "rollout." in str(one.message))


def advantages() -> dict:
    """verl's ``grpo`` estimator and ours, for groups of 3, 2 and 1 with strings as ids."""
    index = np.array(["a", "b", "a", "b", "a", "c"], dtype=object)
    rewards = torch.zeros(6, 3)
    rewards[:, -1] = torch.tensor([1.0, 0.3, 0.0, 0.3, 0.5, 1.0])
    mask = torch.ones(6, 3)
    results = {}
    for scaled in (True, False):
        config = omega_conf_to_dataclass(composed(f"algorithm.norm_adv_by_std_in_grpo={scaled}").algorithm)
        ours, _ = get_adv_estimator_fn("ed_group")(
            token_level_rewards=rewards, response_mask=mask, index=index, config=config
        )
        theirs, _ = compute_grpo_outcome_advantage(rewards.clone(), mask, index, norm_adv_by_std_in_grpo=scaled)
        results[scaled] = (ours, theirs)
    return results


def main(results: str) -> None:
    aggregated = {
        mode: {
            "stock": loss_of(mode=mode),
            "zero": loss_of(*ZERO, mode=mode),
            "explored": loss_of(*EXPLORED, mode=mode),
            "floored": loss_of(*EXPLORED, FLOORED, mode=mode),
            "masked": loss_of(*EXPLORED, mode=mode, masked=True),
        }
        for mode in AGGREGATIONS
    }
    several = [f"{ACTOR}.ppo_mini_batch_size=256", "data.train_batch_size=1024"]
    one = [f"{ACTOR}.ppo_mini_batch_size=1024", "data.train_batch_size=1024"]
    gpus = ["trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1"]
    torch.save(
        {
            "found": found, "aggregated": aggregated,
            "batch": {name: batch(False)[name] for name in ("old_log_probs", "response_mask", "rollout_is_weights")},
            "advantages": advantages(),
            "bases": {name: with_base(name) for name in ("vanilla", "gspo", "cispo", "clip_cov", "geo_mean", "sapo",
                                                         "dppo_tv")},
            "refused": {
                "several": refusal(*gpus, *several, *EXPLORED), "one": refusal(*gpus, *one, *EXPLORED),
                "one without the term": refusal(*gpus, *one, *ZERO),
                "no coefficient": refusal(*gpus, *several, *EXPLORED[:2]),
                "no settings": refusal(*gpus, *several, EXPLORED[0]),
                "another mode": refusal(*gpus, *several, f"{ACTOR}.policy_loss.loss_mode=gspo", *EXPLORED[1:]),
                "no mode": refusal(*gpus, *several, *EXPLORED[1:]),
                "misspelled": refusal(*gpus, *several, *EXPLORED, f"+{ACTOR}.policy_loss.log_ratio_flor=-1"),
                "unknown base": refusal(*gpus, *several, *EXPLORED, f"+{ACTOR}.policy_loss.base_loss=vanila"),
                "cut": warnings_of(*gpus, *several, *EXPLORED, "actor_rollout_ref.rollout.top_p=0.9"),
                "whole": warnings_of(*gpus, *several, *EXPLORED),
            },
        }, results,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
