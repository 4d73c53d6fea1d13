"""Exact computations over tensors that are split among processes, each with an explicit process group."""

from nemo_edo.parallel.logprobs import linear_logprobs_and_entropy, vocab_parallel_logprobs_and_entropy

__all__ = ["linear_logprobs_and_entropy", "vocab_parallel_logprobs_and_entropy"]
