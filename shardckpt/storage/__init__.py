"""Bytes at names: local and fsspec stores, ranged reads, publishing. Knows no tensor."""
