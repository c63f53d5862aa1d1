"""The plan of a pass: its tokens and their cache slots, resolved once for all layers (DEEPSEEK_V4.md §3.3, §4.3)."""
