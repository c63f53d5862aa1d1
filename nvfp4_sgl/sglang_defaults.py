"""SGLang's defaults for DeepSeek-V4 on a GPU, for what is said of a server that is not there."""

REQUESTS, CHUNK = 256, 8192
"""``--max-running-requests`` and ``--chunked-prefill-size``."""
FRACTION = 0.85
"""A ``--mem-fraction-static`` like those that it chooses."""
