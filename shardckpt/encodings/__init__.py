"""Encodings: safetensors, zip, pickle, tagged JSON, codecs."""
