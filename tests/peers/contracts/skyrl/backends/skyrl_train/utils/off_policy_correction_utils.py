def off_policy_correction_enabled(off_policy_correction):
    return off_policy_correction.tis_ratio_type is not None


def apply_off_policy_correction(loss, old_log_probs, rollout_logprobs, loss_mask, off_policy_correction):
    """A cap of the sampler's mismatch, as the ratio of tokens."""
    if rollout_logprobs is not None:
        ratio = (old_log_probs - rollout_logprobs).exp()
        loss = loss * ratio.clamp(max=off_policy_correction.token_tis_ratio_clip_high)
    return loss, loss_mask, {}
