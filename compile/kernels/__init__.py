"""Kernels: attention over a paged KV pool in Triton, for the torch engine and as a TensorRT plugin."""
