"""Greedy tokens of rows of logits, behind the LM head."""
