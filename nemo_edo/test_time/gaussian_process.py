"""Bayesian linear regression over embeddings: how uncertain the reward of a node is, given the nodes seen so far.

r = phi w + noise, w ~ N(0, I / prior_precision), noise ~ N(0, noise_variance). After observations Phi the posterior
precision of w is A = Phi^T Phi / noise_variance + prior_precision I, and a new reward's predictive variance is
phi A^{-1} phi^T + noise_variance (the paper's appendix on SearchLLM; Rasmussen and Williams 2006, section 2.1).

A is kept as U U^T, U upper triangular, and an observation is a rank-one update of U. So phi A^{-1} phi^T is the square
of a norm, |U^{-1} phi|^2, which no rounding can make negative. The Sherman-Morrison update of A^{-1} costs the same but
subtracts nearly equal numbers: for long, nearly collinear embeddings it ends with negative variances. For the same
reason all arithmetic is in float64: in float32 the factor's error reaches 1e-3 there.

Dimensions: D components of an embedding, N embeddings.
"""

import math

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import pad


class PosteriorVariance:
    """The posterior after embeddings have been observed, one by one or in blocks; their order does not matter.

    dim: D. prior_precision: 1 / variance of each weight before any observation. noise_variance: of a reward, in its
    unit squared. dtype: of the results; the [D, D] factor is float64 whatever it is. Embeddings of any dtype are taken
    and moved to ``device``; no gradient flows. An observation costs O(D^2), and so does a variance or a mean.
    Raises ValueError for a dim below 1, and unless prior_precision and noise_variance are finite and above 0.
    """

    def __init__(
        self,
        dim: int,
        prior_precision: float,
        noise_variance: float,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        if dim < 1:
            raise ValueError(f"dim is {dim}, expected at least 1")
        for name, value in (("prior_precision", prior_precision), ("noise_variance", noise_variance)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}, expected a finite number above 0")
        self.dim = dim
        self.prior_precision = prior_precision
        self.noise_variance = noise_variance
        self.dtype = dtype
        self.device = device
        self.reset()

    def reset(self) -> None:
        eye_DD = torch.eye(self.dim, dtype=torch.float64, device=self.device)
        self._factor_DD = math.sqrt(self.prior_precision) * eye_DD
        self._whitened_mean_D = torch.zeros_like(eye_DD[0])  # U^T E[w]
        self._targets = 0
        self.count = 0

    def observe(self, phi: Tensor | ArrayLike, target: Tensor | ArrayLike | None = None) -> None:
        """Adds the embeddings phi, [D] or [N, D], with their observed rewards, a number or [N], where given. Raises
        ValueError for another shape, values that are not finite or whose squares overflow, and if only some of the
        observations have a target."""
        phi = torch.as_tensor(phi)
        phi_ND = self._rows(phi)
        if self._targets != (0 if target is None else self.count):
            raise ValueError(
                f"target is {'missing' if target is None else 'given'}, but {self._targets} of the {self.count} "
                "earlier observations have one; give it with all or with none"
            )
        if target is None:
            target_N = torch.zeros_like(phi_ND[:, 0])
        else:
            target_N = torch.as_tensor(target, dtype=torch.float64, device=self.device).detach()
            if target_N.shape != phi.shape[:-1] or not torch.isfinite(target_N).all():
                raise ValueError(f"target is {target!r}, expected a finite number for each of {len(phi_ND)} embeddings")
        for phi_D, target_ in zip(phi_ND, target_N.reshape(-1), strict=True):
            self._update(phi_D / math.sqrt(self.noise_variance), target_ / math.sqrt(self.noise_variance))
            self.count += 1
            self._targets += target is not None

    def variance(self, phi: Tensor | ArrayLike, *, include_noise: bool = True) -> Tensor:
        """phi A^{-1} phi^T + noise_variance for [D] or [N, D]: scalar or [N], never below noise_variance. Without the
        noise, the variance of the expected reward phi w. Raises ValueError for another shape or values not finite."""
        phi = torch.as_tensor(phi)
        whitened_ND = self._whiten(self._rows(phi))
        variance_N = whitened_ND.square().sum(dim=1) + (self.noise_variance if include_noise else 0.0)
        return variance_N.reshape(phi.shape[:-1]).to(self.dtype)

    def mean(self, phi: Tensor | ArrayLike) -> Tensor:
        """phi E[w] = phi A^{-1} Phi^T targets / noise_variance for [D] or [N, D]: scalar or [N]; 0 before any target.
        Raises ValueError for another shape, values that are not finite, and after observations without targets."""
        if self._targets != self.count:
            raise ValueError(f"no mean: the {self.count} observations came without targets")
        phi = torch.as_tensor(phi)
        whitened_ND = self._whiten(self._rows(phi))
        return (whitened_ND @ self._whitened_mean_D).reshape(phi.shape[:-1]).to(self.dtype)

    def _rows(self, phi: Tensor) -> Tensor:
        if phi.ndim not in (1, 2) or phi.shape[-1] != self.dim:
            raise ValueError(f"phi has shape {tuple(phi.shape)}, expected [{self.dim}] or [N, {self.dim}]")
        if not torch.isfinite(phi).all():
            raise ValueError("phi has NaN or infinite values; all must be finite")
        return phi.detach().to(device=self._factor_DD.device, dtype=torch.float64).reshape(-1, self.dim)

    def _whiten(self, phi_ND: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self._factor_DD, phi_ND.mT, upper=True).mT

    def _update(self, phi_D: Tensor, target: Tensor) -> None:
        """A + phi phi^T = U (I + p p^T) U^T with p = U^{-1} phi, and I + p p^T = K K^T with K upper triangular:

        K_jj = sqrt(t_j / t_{j+1}), K_ij = p_i p_j / sqrt(t_j t_{j+1}) for i < j, t_j = 1 + sum_{i >= j} p_i^2
        (Gill, Golub, Murray and Saunders 1974). Column j of U K takes one running sum over the columns
        before it, hence O(D^2). The mean follows as one more row of U would: what the target adds comes first.
        """
        p_D = self._whiten(phi_D[None])[0]
        tails_D = 1.0 + p_D.square().flip(0).cumsum(0).flip(0)
        if not torch.isfinite(tails_D[0]):
            raise ValueError(f"phi has a norm of {phi_D.norm().item():.3g} noise deviations: its square overflows")
        root_D = tails_D.sqrt()
        next_root_D = pad(root_D[1:], (0, 1), value=1.0)
        scale_D, mix_D = root_D / next_root_D, p_D / (root_D * next_root_D)

        def times_k(rows: Tensor, first: Tensor | float) -> Tensor:
            before = first + pad((rows * p_D)[..., :-1].cumsum(-1), (1, 0))
            return rows * scale_D + before * mix_D

        surprise = target - self._whitened_mean_D @ p_D
        self._whitened_mean_D = times_k(self._whitened_mean_D, surprise)
        self._factor_DD = times_k(self._factor_DD, 0.0)
