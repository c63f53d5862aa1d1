"""The plan of a pass: its tokens and their cache slots, resolved once for all layers (specification §3.3, §4.3)."""
