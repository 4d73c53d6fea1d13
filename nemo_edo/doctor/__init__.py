"""What a run needs and what a machine has, told before time is spent: memory, packages, devices, disk."""
