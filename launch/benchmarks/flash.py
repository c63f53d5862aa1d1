"""config.json and tokenizer of DeepSeek-V4-Flash, whole or with fewer layers; weights are made by the server that is
measured (``--load-format dummy``)."""

from __future__ import annotations

import json
from pathlib import Path

from nvfp4_sgl.synthetic.tiny_config import BASE, TinyFormat, tiny_config
from nvfp4_sgl.synthetic.tokenizer import write_tokenizer
from tests.support.released import FLASH, config_json

LAYERS = FLASH["num_hidden_layers"]


def write_flash(folder: Path, format: TinyFormat, layers: int = LAYERS) -> Path:
    """Write config.json, generation_config.json and a tokenizer of Flash's vocabulary to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    ratios = [*FLASH["compress_ratios"][:layers], 0]
    fields = config_json(FLASH, num_hidden_layers=layers, compress_ratios=ratios)
    known = {name: value for name, value in fields.items() if name in BASE or name == "compress_ratios"}
    (folder / "config.json").write_text(json.dumps(tiny_config(format, known), indent=1))
    (folder / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}')
    write_tokenizer(folder, FLASH["vocab_size"], FLASH["max_position_embeddings"])
    return folder
