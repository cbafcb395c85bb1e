"""Witness records next to a run's steps."""
