"""ED-GRPO in other trainers: one module each, which imports its trainer and, of this package, only the pure functions."""
