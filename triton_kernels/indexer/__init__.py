"""The lightning indexer: prepare its queries, score the entries, select the best ones."""
