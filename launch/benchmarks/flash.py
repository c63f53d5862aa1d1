"""config.json and tokenizer of DeepSeek-V4-Flash, whole or with fewer layers; weights are made by the server that is
measured (``--load-format dummy``). Source: the release's config.json, DEEPSEEK_V4.md §1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvfp4_sgl.checkpoint.tiny_config import TinyFormat, tiny_config
from nvfp4_sgl.checkpoint.tokenizer import write_tokenizer

LAYERS = 43
DIMENSIONS: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 256,
    "num_hash_layers": 3,
    "index_n_heads": 64,
    "index_topk": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
RATIOS = [0, 0, *[4, 128] * 20, 4]
"""Of the layers; each of 4 a CSA layer, each of 128 an HCA layer."""


def write_flash(folder: Path, format: TinyFormat, layers: int = LAYERS) -> Path:
    """Write config.json, generation_config.json and a tokenizer of Flash's vocabulary to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = DIMENSIONS | {"num_hidden_layers": layers, "compress_ratios": [*RATIOS[:layers], 0]}
    (folder / "config.json").write_text(json.dumps(tiny_config(format, fields), indent=1))
    (folder / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}')
    write_tokenizer(folder, DIMENSIONS["vocab_size"], 1048576)
    return folder
