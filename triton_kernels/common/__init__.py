"""What every family shares: rounding, RoPE tables, launch overlap, facts of the chip."""
