"""Observes the results of the decoder's boundaries: one layer against the reference, a server's passes on disk."""
