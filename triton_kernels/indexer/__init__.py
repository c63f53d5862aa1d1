"""The lightning indexer: queries, scores, selection of the best entries."""
