"""Receive versions: read, verify and combine, then apply."""
