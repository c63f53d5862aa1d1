"""Findings about a checkpoint: problems and notes, for people and for programs."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """A finding about a tensor, or about the whole checkpoint where ``tensor`` is ``None``.

    ``kind`` is one word for programs: what docs/formats.md lists.
    """

    tensor: str | None
    kind: str
    message: str
