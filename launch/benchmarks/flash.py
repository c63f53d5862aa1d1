"""config.json and tokenizer of DeepSeek-V4-Flash, for benchmarks that know no other model."""

from __future__ import annotations

from pathlib import Path

from benchmarks.released import MODELS, write_released
from nvfp4_sgl.synthetic.tiny_config import TinyFormat

LAYERS = MODELS["flash"].layers


def write_flash(folder: Path, format: TinyFormat, layers: int = LAYERS) -> Path:
    """Flash's files, as :func:`.released.write_released` writes them."""
    return write_released(folder, MODELS["flash"], format, layers)
