"""Captures in the memory of this machine: list and stop their holders."""
