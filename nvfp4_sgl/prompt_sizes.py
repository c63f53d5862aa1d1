"""Sizes of the prompt passes that a server captures in CUDA graphs, for the server and for forecasts of its memory."""

BY_DEFAULT = True
"""Whether a server on a GPU captures prompts unless it is told."""
TOKENS = (256, 512, 1024, 2048)
"""Tokens of the passes that are captured, twice as many each time: of more than 128 less than half is padding. Of more
than the last, the GPU works longer than Python."""
REQUESTS = 16
"""Requests of a captured pass, the padding's included. The compressors have some programs for each."""
