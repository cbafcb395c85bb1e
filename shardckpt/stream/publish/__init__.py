"""Publish versions: keep the last one, compare, write, commit."""
