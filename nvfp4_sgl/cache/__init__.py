"""State that persists between steps: row stores, compressor state rings, and the plan of a batch over them."""
