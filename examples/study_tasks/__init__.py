"""Tasks of the shipped studies."""
