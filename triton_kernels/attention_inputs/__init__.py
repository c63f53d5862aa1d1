"""What an attention layer makes of its first product: latents, window keys, compressed entries and their states."""
