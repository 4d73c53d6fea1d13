"""What several test folders share: small models, scripted servers, workers of multi-process tests."""
