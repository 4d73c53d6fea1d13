"""A run from its config to its report: its folder, its stages, how it stops and resumes. Import from the modules."""
