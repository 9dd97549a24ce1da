"""Tests of quantize."""
