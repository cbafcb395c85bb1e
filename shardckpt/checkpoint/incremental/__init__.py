"""Refer to unchanged chunks of a base checkpoint."""
