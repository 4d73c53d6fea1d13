"""Supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

from nemo_edo.losses.term import LossTerm, reduce_tokens, without_padding


def sft_loss(logprobs_BT: Tensor, mask_BT: Tensor) -> LossTerm:
    """Negative log-likelihood in nats, summed over tokens with mask 1; count = such tokens.

    Raises ValueError for shapes that differ and for NaN or infinity at a valid token.
    """
    (logprobs_BT,) = without_padding(mask_BT, logprobs_BT=logprobs_BT)
    return reduce_tokens(-logprobs_BT, mask_BT, "token-mean")
