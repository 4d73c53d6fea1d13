"""ED-GRPO in other trainers: one module for each, which imports that trainer and of ours the pure functions alone."""
