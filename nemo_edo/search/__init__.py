"""SearchLLM on a run's test problems: the job, the proposer of steps, the stored results. Import from the modules."""
