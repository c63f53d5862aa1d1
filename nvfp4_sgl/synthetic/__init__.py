"""Checkpoints that nobody trained: ``tiny`` writes small complete ones, ``dummy`` draws weights where a server loads.

``tokenizer`` writes the tokenizer that goes with them, ``random_words`` are the numbers that any device draws alike.
"""
