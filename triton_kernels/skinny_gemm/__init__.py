"""GEMMs of few tokens with small bf16 matrices."""
