"""Buckets of parameters: layout of buffers, gathering, reduction, extensions."""
