"""Quantize: choose the numbers, layer by layer, and write the quantized checkpoint."""
