from .off_policy_correction_utils import apply_off_policy_correction


class PolicyLossRegistry:
    losses: dict = {}

    @classmethod
    def register(cls, name, loss):
        if name in cls.losses:
            raise ValueError(f"policy loss '{name}' already registered")
        cls.losses[name] = loss

    @classmethod
    def get(cls, name):
        return cls.losses[name]

    @classmethod
    def list_available(cls):
        return list(cls.losses)

    @classmethod
    def unregister(cls, name):
        del cls.losses[name]


def reduce_loss(loss, loss_mask):
    return (loss * loss_mask).sum()


def ppo_policy_loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    assert config.policy_loss_type in ("regular", "dual_clip")
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    loss, loss_mask, metrics = apply_off_policy_correction(
        -(ratio * advantages).minimum(clipped * advantages),
        old_log_probs, rollout_logprobs, loss_mask, config.off_policy_correction,
    )  # fmt: skip
    return reduce_loss(loss, loss_mask), {"clip_ratio": 0.0, **metrics}


PolicyLossRegistry.register("regular", ppo_policy_loss)
