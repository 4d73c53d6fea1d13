"""Checks of a machine and of a config: ``nemo-edo doctor``, ``nemo-edo selftest`` and the node check of Slurm jobs."""
