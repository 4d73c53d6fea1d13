"""What a policy can do on the test problems. Import from the modules."""
