"""Where the tokens of a pass stand, resolved to cache slots once for all layers."""
