"""What a run needs and what a machine has, reported before time is spent: memory, packages, devices, disk."""
