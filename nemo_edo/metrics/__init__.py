"""What is measured: accuracy of several responses, diversity, entropy, and how sure the numbers are."""

from typing import TYPE_CHECKING, Any

from nemo_edo.metrics.diversity import (
    answer_entropy,
    distinct_answers,
    distinct_counts,
    distinct_n,
    pooled_distinct,
    self_bleu,
)
from nemo_edo.metrics.intervals import (
    Interval,
    bootstrap_ratio,
    bootstrap_ratios,
    detectable,
    mean_interval,
    mean_p_value,
    paired_bootstrap,
    paired_share_interval,
    proportion_interval,
    share_interval,
    share_intervals,
)
from nemo_edo.metrics.paired import (
    SolvedAndLost,
    holm,
    mcnemar,
    paired_difference,
    paired_permutation_test,
    solved_and_lost,
)
from nemo_edo.metrics.pass_at_k import expected_vote_score, majority_at_k, pass_at_k, vote_success

if TYPE_CHECKING:
    from nemo_edo.parallel.logprobs import entropy_from_logits


def __getattr__(name: str) -> Any:
    """``entropy_from_logits`` is looked up when it is used: it alone loads torch."""
    if name != "entropy_from_logits":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nemo_edo.parallel import logprobs

    return logprobs.entropy_from_logits
