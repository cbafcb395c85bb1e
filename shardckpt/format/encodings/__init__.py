"""Containers of bytes: safetensors, zip, pickle, tagged JSON, codecs."""
