"""Optimizer state and flat parameters by name."""
