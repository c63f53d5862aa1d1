"""Keeps chat templates out of our server: DeepSeek's encoder writes the prompts, whatever template is there.

SGLang would still derive from a template's text how answers are parsed and whether a request thinks, and would take
another template for a checkpoint whose path has a word such as ``points`` in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nvfp4_sgl.serving.requests import serves_our_model
from nvfp4_sgl.serving.sglang import front_end

logger = logging.getLogger(__name__)


def load_chat_template(original: Callable[..., None], manager: Any, tokenizer_manager: Any, *args: Any) -> None:
    """Hook around SGLang's choice of a template: none; one that comes with the checkpoint is named in the log.

    ``--chat-template`` is refused before (:mod:`nvfp4_sgl.serving.flags.front_end`).
    """
    if not serves_our_model():
        original(manager, tokenizer_manager, *args)
        return
    tokenizer = tokenizer_manager.tokenizer
    if getattr(tokenizer, "chat_template", None) is not None:
        tokenizer.chat_template = None
        logger.info("nvfp4_sgl: the checkpoint's chat template is not used: DeepSeek's encoder writes the prompts")
    front_end.use_no_template(manager)
