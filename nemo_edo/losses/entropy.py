"""The entropy bonus: the plain rival of the exploration term."""

from __future__ import annotations

from torch import Tensor

from nemo_edo.losses.term import LossTerm, reduce_tokens, without_padding


def entropy_bonus(
    entropies_BT: Tensor, mask_BT: Tensor, *, reduction: str, norm_length: float | None = None
) -> LossTerm:
    """The **negative** entropy: multiplied by a positive coefficient and added to a minimised loss, it raises entropy.

    entropies_BT: exact entropies in nats of pi_theta(. | x, y_<t) at the sampled positions.
    Sum, count and errors are those of ``reduce_tokens``.
    """
    (entropies_BT,) = without_padding(mask_BT, entropies_BT=entropies_BT)
    return reduce_tokens(-entropies_BT, mask_BT, reduction, norm_length)
