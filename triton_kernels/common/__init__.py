"""Shared by every family: rounding, the RoPE table, programmatic dependent launch, properties of the chip."""
