"""What a policy can do on the test problems, and how arms compare."""
