"""Launches on a real Slurm of two nodes on this machine."""
