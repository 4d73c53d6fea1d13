"""ED-GRPO in other trainers: one module each, which imports its trainer and only the pure functions of ours."""
