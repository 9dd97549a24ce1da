"""Structured output: answers that a JSON schema, a regular expression or a grammar describes."""
