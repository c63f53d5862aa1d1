"""What every family shares: argument checks, rounding, RoPE tables, launch overlap, facts of the chip."""
