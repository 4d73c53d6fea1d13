"""How far two judges agree beyond chance."""

from __future__ import annotations

from nemo_edo.metrics.checks import whole_number


def cohen_kappa(both: int, only_first: int, only_second: int, neither: int) -> float:
    """Cohen's kappa (1960) of two judges' yes and no: (p_o - p_e) / (1 - p_e).

    p_o is the share on which they agree, p_e what they would agree on if each said yes as often, but independently.
    both, only_first, only_second, neither: how many things each of the pairs of verdicts was given to. 1.0 where both
    say the same of everything, also if that is one and the same answer, where the quotient is 0 / 0.
    Raises ValueError for counts that are negative or all 0.
    """
    counts = [whole_number("a count", count, least=0) for count in (both, only_first, only_second, neither)]
    total = sum(counts)
    if total == 0:
        raise ValueError("all counts are 0: nothing was judged")
    first, second = both + only_first, both + only_second
    expected = first * second + (total - first) * (total - second)  # times total squared
    observed = (both + neither) * total
    return 1.0 if observed == total**2 else (observed - expected) / (total**2 - expected)
