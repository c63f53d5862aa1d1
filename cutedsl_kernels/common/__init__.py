"""Shared parts of the GEMMs of every architecture; ``sm90`` and ``sm100`` import from here, and neither from the
other."""
