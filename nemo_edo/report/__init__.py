"""A run's report, or that of several runs: what was measured, in words, charts and pages. Import from the modules."""
