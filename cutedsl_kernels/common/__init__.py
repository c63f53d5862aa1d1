"""What the GEMMs of every architecture share; ``sm90`` and ``sm100`` import from here, and neither from the other."""
