"""Sweeps and studies: many trainings, one runner, and what their results show together."""
