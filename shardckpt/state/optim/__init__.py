"""Optimizer state: build and load it."""
