"""Comparison of resumed training with a witness: records, verdict."""
