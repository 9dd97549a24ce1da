"""Compile: one decoder definition, lowered by each backend into an engine folder."""
