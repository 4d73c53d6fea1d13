"""Runs on a cluster: the job that is submitted, the check of its nodes, and what a task does (docs/cluster.md)."""
