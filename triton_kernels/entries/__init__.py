"""Rows of SGLang's key caches: pack and store key/value entries and index entries."""
