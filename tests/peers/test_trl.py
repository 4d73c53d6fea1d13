"""Values and gradients against TRL's own trainers, on one batch of float32, with the same settings."""

import pytest
import torch
from torch.autograd import grad

from nemo_edo.losses import (
    GRPOLossConfig,
    cispo_config,
    dapo_config,
    dpo_loss,
    dr_grpo_config,
    group_advantages,
    grpo_loss,
    gspo_config,
    ipo_loss,
    sequence_logprobs,
    xpo_loss,
)

pytestmark = pytest.mark.peers
GROUP, LENGTHS, TOKENS = 4, [6, 3, 1, 5, 2, 6, 4, 4], 6
MASK = (torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]).float()
PAIRS, PROMPT, VOCABULARY = 4, 2, 7
POLICY_WON = torch.tensor([True, False, False, True])

close = dict(rtol=1e-5, atol=1e-6)


def plain(**changes) -> GRPOLossConfig:
    return GRPOLossConfig(**{"alpha": 0.0, "beta": 0.0, **changes})


# TRL's settings, and ours. TRL's beta is 0 by default.
GRPO = {
    "grpo with k3": ({"loss_type": "grpo", "beta": 0.04}, plain(beta=0.04)),
    "asymmetric clip": ({"loss_type": "grpo", "epsilon_high": 0.28}, plain(clip_high=0.28)),
    "token mean": ({"loss_type": "bnpo", "beta": 0.1}, plain(beta=0.1, aggregation="token-mean")),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, dapo_config()),
    "dr_grpo": ({"loss_type": "dr_grpo", "max_completion_length": 9, "scale_rewards": "none"}, dr_grpo_config(9)),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, cispo_config(clip_high=0.2)),
    "kl weighted by the ratio": (
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
        plain(beta=0.1, kl_importance="ratio"),
    ),
    "two-sided clip": ({"loss_type": "grpo", "delta": 1.5}, plain(dual_clip=1.5)),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2},
        gspo_config(clip_low=3e-2, clip_high=4e-2),
    ),
}
TRUNCATED = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_cap": 1.2}
MASKED = {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_cap": 1.2}
GRPO_OF_SAMPLER = {
    "truncated importance weights": (
        {"loss_type": "grpo", "beta": 0.04, **TRUNCATED},
        plain(beta=0.04, sampler_correction="tis", tis_cap=1.2),
    ),
    "masked importance weights": (
        {"loss_type": "dapo", **MASKED},
        plain(aggregation="token-mean", sampler_correction="icepop", icepop_low=0.0, icepop_high=1.2),
    ),
    "gspo with truncated weights of responses": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2,
         **TRUNCATED, "vllm_importance_sampling_mode": "sequence_truncate"},
        gspo_config(clip_low=3e-2, clip_high=3e-2, sampler_correction="tis", tis_cap=1.2, sampler_level="sequence"),
    ),
}
PREFERENCE = {
    "dpo": {"loss_type": ["sigmoid"], "beta": 0.3},
    "dpo of token means": {"loss_type": ["sigmoid_norm"], "beta": 0.3},
    "ipo": {"loss_type": ["ipo"], "beta": 0.3},
}
XPO = {"loss_type": "sigmoid", "beta": [0.3], "alpha": [0.2]}


def grpo_tensors(with_sampler: bool) -> dict[str, torch.Tensor]:
    """Random log-probabilities near each other, none above 0, and two groups of rewards."""
    generator = torch.Generator().manual_seed(0)

    def near(x: torch.Tensor, spread: float) -> torch.Tensor:
        return (x + spread * torch.randn(x.shape, generator=generator)).clamp(max=-0.01)

    old = -0.1 - torch.randn(MASK.shape, generator=generator).abs()
    tensors = {"old": old, "logprobs": near(old, 0.4), "ref": near(old, 0.3), "lengths": torch.tensor(LENGTHS)}
    tensors["rewards"] = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.2, 0.7, -0.3, 0.2])
    return tensors | ({"sampler": near(old, 0.3)} if with_sampler else {})


def preference_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2 * PAIRS, PROMPT + TOKENS)
    last = PROMPT + torch.tensor(LENGTHS)[:, None]
    at = torch.arange(shape[1])
    present = at < last
    return {
        "logits": torch.randn(*shape, VOCABULARY, generator=generator),
        "ref_logits": torch.randn(*shape, VOCABULARY, generator=generator),
        "tokens": torch.randint(VOCABULARY, shape, generator=generator),
        "attention_mask": present.long(),
        "completion_mask": ((at >= PROMPT) & present).long(),
    }


def all_cases() -> dict[str, dict]:
    cases = {}
    for name, (settings, _) in (GRPO | GRPO_OF_SAMPLER).items():
        cases[name] = ("grpo", {"num_generations": GROUP, **settings}, grpo_tensors(name in GRPO_OF_SAMPLER))
    for name, settings in PREFERENCE.items():
        cases[name] = ("dpo", settings, preference_tensors())
    cases["xpo"] = ("xpo", XPO, preference_tensors() | {"chosen": POLICY_WON})
    return {name: dict(zip(("kind", "settings", "tensors"), case, strict=True)) for name, case in cases.items()}


@pytest.fixture(scope="module")
def theirs(run_in_peer, tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    """TRL's results for every case, from one process: importing TRL is slow."""
    folder = tmp_path_factory.mktemp("trl")
    torch.save(all_cases(), folder / "cases.pt")
    run_in_peer("trl-oldest", "trl_losses.py", folder / "cases.pt", folder / "results.pt")
    return torch.load(folder / "results.pt", weights_only=True)


def assert_agree(loss: torch.Tensor, expected: dict[str, torch.Tensor], **leaves: torch.Tensor) -> None:
    torch.testing.assert_close(loss.detach(), expected["loss"], **close)
    for name, gradient in zip(leaves, grad(loss, list(leaves.values())), strict=True):
        assert gradient.abs().max() > 1e-3, f"nothing to compare: no gradient for {name}"
        torch.testing.assert_close(gradient, expected[name], **close)


def trl_advantages(rewards: torch.Tensor, scale: str) -> torch.Tensor:
    groups = torch.arange(len(rewards)) // GROUP
    scale = "none" if scale == "none" else "std"
    return group_advantages(rewards, groups, scale=scale, deviation="sample", epsilon=1e-4)


@pytest.mark.parametrize("name", [*GRPO, *GRPO_OF_SAMPLER])
def test_grpo_and_its_variants_agree_with_trl_from_rewards_to_gradients(theirs, name):
    settings, config = (GRPO | GRPO_OF_SAMPLER)[name]
    tensors = grpo_tensors(name in GRPO_OF_SAMPLER)
    advantages = trl_advantages(tensors["rewards"], settings.get("scale_rewards", "group"))
    torch.testing.assert_close(advantages, theirs[name]["advantages"], **close)
    logprobs = tensors["logprobs"].requires_grad_()
    loss, metrics = grpo_loss(
        logprobs, tensors["old"], tensors["ref"], advantages, MASK, config, sampler_logprobs=tensors.get("sampler")
    )
    assert 0 < metrics["clip_fraction"].mean() < 1
    assert_agree(loss.mean(), theirs[name], logprobs=logprobs)


def responses(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The policy's logits as a leaf; log-probabilities [2P, T] under both models; and their mask."""
    logits, labels = tensors["logits"].requires_grad_(), tensors["tokens"][:, 1:, None]
    both = (x[:, :-1].log_softmax(-1).gather(-1, labels).squeeze(-1) for x in (logits, tensors["ref_logits"]))
    return logits, *both, tensors["completion_mask"][:, 1:]


@pytest.mark.parametrize("name", PREFERENCE)
def test_preference_losses_agree_with_trl(theirs, name):
    logits, *both, mask = responses(preference_tensors())
    policy, ref = (sequence_logprobs(x, mask, length_normalized=name != "dpo").chunk(2) for x in both)
    loss = (ipo_loss if name == "ipo" else dpo_loss)(*policy, *ref, beta=0.3)
    assert_agree(loss.mean(), theirs[name], logits=logits)


def test_xpo_agrees_with_trl(theirs):
    logits, *both, mask = responses(preference_tensors())
    policy, ref = (sequence_logprobs(x, mask).chunk(2) for x in both)
    pairs = [
        torch.where(of_policy_is_meant, of_policy, of_reference)
        for of_policy, of_reference in (policy, ref)
        for of_policy_is_meant in (POLICY_WON, ~POLICY_WON)  # as chosen, and as rejected
    ]
    preference, exploration = xpo_loss(*pairs, policy[1], beta=0.3, alpha=0.2)
    assert_agree(preference.mean() + exploration.mean(), theirs["xpo"], logits=logits)
