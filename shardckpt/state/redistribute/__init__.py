"""Redistribute tensors: all-to-all, scatter from rank 0, rows of DTensors."""
