"""Eval: measure how far a quantized model drifts from its baseline, and gate on it."""
