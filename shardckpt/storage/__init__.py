"""Stores of named bytes: local and fsspec stores, range requests, publishing."""
