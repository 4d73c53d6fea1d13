"""Spending more compute at test time: votes over several responses."""

from nemo_edo.test_time.voting import expected_vote_score, majority_vote, weighted_vote

__all__ = ["expected_vote_score", "majority_vote", "weighted_vote"]
