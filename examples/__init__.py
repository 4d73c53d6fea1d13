"""Examples, and the tasks of the shipped studies, which configs name as ``examples.study_tasks``."""
