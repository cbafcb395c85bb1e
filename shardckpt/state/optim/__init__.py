"""Optimizer state: build and load state dicts."""
