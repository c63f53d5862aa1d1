"""Rows of SGLang's key caches: packed key/value entries and index entries."""
