"""Weights in fp8 with a scale for each block: quantize them, and take them back."""
