"""Prove a resume: record training steps after a save, compare them after a restore."""
