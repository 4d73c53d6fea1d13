"""Scorers: they turn responses into rewards. Import from the modules."""
