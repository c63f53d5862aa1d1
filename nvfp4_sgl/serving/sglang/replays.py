"""Preparations of SGLang's runners of captured graphs before a replay."""

from __future__ import annotations

from typing import Any


def planned_alone(runner: Any) -> Any | None:
    """The attention backend that ``runner`` prepares for a replay; ``None`` where it prepares more.

    That is a graph of metadata, which counts the replays beside it, and the batch of LoRA adapters.
    """
    if runner._metadata_glue is not None or runner.model_runner.lora_manager is not None:
        return None
    return runner._replay_attn_backend()
