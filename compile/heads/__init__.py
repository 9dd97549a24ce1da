"""Draft heads: small networks that read a target's hidden states and propose the tokens that follow."""
