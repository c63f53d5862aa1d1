"""What each boundary of the decoder gives, observed: one layer against the reference, a server's passes on disk."""
