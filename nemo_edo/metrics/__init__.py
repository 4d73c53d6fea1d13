"""What is measured: accuracy of several responses, diversity, entropy, and how sure the numbers are."""

from nemo_edo.metrics.diversity import distinct_counts, distinct_n
from nemo_edo.metrics.entropy import entropy_from_logits
from nemo_edo.metrics.intervals import Interval, bootstrap_ratio, mean_interval, paired_bootstrap
from nemo_edo.metrics.pass_at_k import expected_vote_score, majority_at_k, pass_at_k

__all__ = [
    "Interval",
    "bootstrap_ratio",
    "distinct_counts",
    "distinct_n",
    "entropy_from_logits",
    "expected_vote_score",
    "majority_at_k",
    "mean_interval",
    "paired_bootstrap",
    "pass_at_k",
]
