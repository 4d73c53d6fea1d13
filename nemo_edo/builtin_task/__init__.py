"""The built-in task: sums of a few numbers, and a small model for them. Import from the modules."""
