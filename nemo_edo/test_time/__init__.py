"""Spending more compute at test time: votes over several responses, best-of-N, and tree search with a memory."""

from nemo_edo.config import SearchConfig
from nemo_edo.metrics.pass_at_k import expected_vote_score
from nemo_edo.test_time.gaussian_process import PosteriorVariance
from nemo_edo.test_time.search_llm import (
    SearchLLM,
    SearchNode,
    SearchResult,
    Step,
    StepPath,
    StepProposer,
    StepScore,
    StepScorer,
)
from nemo_edo.test_time.voting import aggregate_steps, best_of_n, majority_vote, vote_counts, weighted_vote
