"""Training draft heads on what the target itself says: its hidden states over texts and its own answers."""
