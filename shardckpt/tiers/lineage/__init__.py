"""Saves that belong to this run: starts, attempts, claims and the position of the root."""
