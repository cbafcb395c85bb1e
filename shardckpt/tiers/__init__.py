"""Tiers in front of a run's root: captures in memory, and what each step survives."""
