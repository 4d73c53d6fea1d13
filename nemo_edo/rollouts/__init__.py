"""Scored responses on disk: written as they are generated, found again on resume. Import from the modules."""
