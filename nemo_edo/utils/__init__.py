"""Shared helpers: atomic file writes, processes that end with their parent, HTTP answers."""
