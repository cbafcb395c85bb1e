"""Stores of named bytes: local and fsspec stores, range requests, publishing. Independent of tensors."""
