"""Methods: pure functions from a weight, its statistics and a scheme to a quantized tensor."""
