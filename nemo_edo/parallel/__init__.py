"""Exact computations over tensors that are split among processes, each with an explicit process group."""

from nemo_edo.parallel.vocab import vocab_parallel_log_probs_and_entropy

__all__ = ["vocab_parallel_log_probs_and_entropy"]
