"""Backends: each implements the decoder's operations for one target."""
