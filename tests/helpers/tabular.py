"""A softmax policy at every node of a prefix tree: exact expectations over its responses, its optimum, its descent.

The policy is an ``EnumerablePolicy`` (tests/unit/losses/conftest.py). An expectation over one of its versions weights
every response by its probability, so what is checked is the theory, signs included, and not luck. All in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import grad

from nemo_edo.losses import LossTerm


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def probabilities(policy, logits: Tensor) -> Tensor:
    return policy.probabilities(policy.logprobs(logits))


def kl(p: Tensor, q: Tensor) -> float:
    return (p * (p.log() - q.log())).sum().item()


def close(found: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def exact(weights_B: Tensor, term_of: Callable[[slice], LossTerm]) -> Tensor:
    """The expectation of a loss over responses: the loss of each row alone, times the row's weight."""
    return sum(weight * term_of(slice(i, i + 1)).mean() for i, weight in enumerate(weights_B.tolist()))


def path_sums(policy, table: Tensor) -> Tensor:
    """[responses]: the sum along each response of a table with an entry for each prefix and next token."""
    return torch.stack([sum(table[policy.row[y[:t]], y[t]] for t in range(len(y))) for y in policy.responses])


def at_last_token(policy, rewards_B: Tensor) -> Tensor:
    """A table whose path sums are the given rewards of whole responses."""
    table = torch.zeros(len(policy.row), policy.VOCABULARY, dtype=torch.float64)
    for y, reward in zip(policy.responses, rewards_B, strict=True):
        table[policy.row[y[:-1]], y[-1]] = reward
    return table


def backward(policy, table: Tensor, solve: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Logits and root value from the leaves up; ``solve`` makes a node's logits and value from reward + next value."""
    logits, value = torch.zeros_like(table), torch.zeros(len(policy.row), dtype=torch.float64)
    for prefix in sorted(policy.row, key=len, reverse=True):
        row = policy.row[prefix]
        children = [policy.row.get((*prefix, token)) for token in range(policy.VOCABULARY)]
        ahead = torch.stack([table.new_zeros(()) if child is None else value[child] for child in children])
        logits[row], value[row] = solve(table[row] + ahead, row)
    return logits, value[policy.row[()]]


def optimum(policy, table: Tensor, ref_logits: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log pi_r(a|s) = (Q*(s, a) - V*(s)) / beta and V*(root), with Q* = r + beta log pi_ref + V*(next)."""
    ref = ref_logits.detach().log_softmax(-1)

    def solve(reward_and_next: Tensor, row: int) -> tuple[Tensor, Tensor]:
        q = reward_and_next + beta * ref[row]
        v = beta * (q / beta).logsumexp(0)
        return (q - v) / beta, v

    return backward(policy, table, solve)


def minimised(objective: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    x = start.detach().clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [x], max_iter=400, tolerance_grad=1e-11, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(x)
        loss.backward()
        return loss

    optimizer.step(closure)
    return x.detach()


def descended(objective: Callable[[Tensor], Tensor], start: Tensor, *, lr: float, steps: int) -> list[Tensor]:
    """The iterates of gradient descent, the start first."""
    path = [start.detach()]
    for _ in range(steps):
        x = path[-1].clone().requires_grad_()
        path.append((x - lr * grad(objective(x), x)[0]).detach())
    return path
