"""Speculative decoding: drafters propose tokens cheaply, one step of the target verifies them, exactly."""
