"""Random faults in tiny runs: ``python -m tests.chaos --seed S --rounds N``."""
