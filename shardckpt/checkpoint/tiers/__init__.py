"""Tiers in front of the root of a run: captures in memory, and what each step survives."""
