"""Calibrate: text to token windows; a checkpoint run layer by layer; what each linear sees."""
