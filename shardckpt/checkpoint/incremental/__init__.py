"""Incremental saves, which refer to unchanged chunks of a base checkpoint."""
