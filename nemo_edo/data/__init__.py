"""Problems, prompts, answers and batches. Import from the modules."""
