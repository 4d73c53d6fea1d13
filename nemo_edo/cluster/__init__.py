"""Runs on a Slurm cluster: job scripts, the health check of the nodes, and what each task does (docs/slurm.md)."""
