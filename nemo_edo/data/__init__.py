"""Problems, prompts, answers, batches and rollouts on disk; the built-in arithmetic task. Import from the modules."""
