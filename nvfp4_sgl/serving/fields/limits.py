"""Bounds on requests that do not depend on the model."""

from __future__ import annotations

MAX_TOP_K = 2**30
"""SGLang's own value for the whole vocabulary; it keeps top-k in int32."""

LARGEST = 1e30
"""Largest logit bias. Divided by the lowest temperature that is not greedy (1e-6), it still is an fp32 number."""

MAX_CHOICES = 128
"""Bound on ``n``, OpenAI's: SGLang keeps the state of every choice, and each has its own copy of the prompt."""

MAX_SEQUENCES = 4096
"""Bound on prompts times ``n`` of one request."""

MAX_LOGIT_BIASES = 1024
"""Bound on tokens with a bias; SGLang writes them one by one whenever the batch changes."""

MAX_STOPS = 32
"""SGLang's bound on stop strings of a request."""

MAX_STOP_CHARACTERS = 4096
"""Bound on the stop strings of a request together; the end of the answer is searched for them at every token."""

SEEDS = "seeds"
"""Mode of a server whose sampling honours seeds."""

DRAFTING = "drafting"
"""Mode of a server that drafts."""
