"""Folders of safetensors files with an index."""
