"""Verifiers and the judge, which turn responses into rewards. Import from the modules."""
