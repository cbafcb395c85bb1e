"""Weights in fp8 with a scale for each block: quantize and dequantize them."""
