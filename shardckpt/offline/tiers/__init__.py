"""Captures in this machine's memory: list and stop their holders."""
