"""config.json and tokenizer of a released model, whole or with fewer layers; weights are made by the server that is
measured (``--load-format dummy``)."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_sgl.checkpoint import modelopt_words
from nvfp4_sgl.synthetic.tiny_config import BASE, TinyDraft, TinyFormat, tiny_config
from nvfp4_sgl.synthetic.tokenizer import write_tokenizer
from tests.support.released import FLASH, PRO, config_json

NOISE_ID = 128_799
"""Token in place of a DSpark block's unknown ones, of both releases."""


class DraftWeights(enum.StrEnum):
    """Storages that a draft's matrices have where the decoder is full NVFP4."""

    NVFP4 = "nvfp4"
    """NVFP4, every matrix."""
    RELEASED = "released"
    """Those of the release, which ``nvfp4-sgl convert`` keeps: routed experts in MXFP4, others in FP8."""


@dataclass(frozen=True)
class Released:
    """A released model, and what a server of its whole size is given.

    Attributes:
        name: of the release. config: its fields.
        fraction: ``--mem-fraction-static``, by which 256 requests of the usual lengths fit the least number of H200s
            that holds the weights.
        start_seconds: limit of a server's start.
        markov_rank: of its DSpark draft's Markov head.
    """

    name: str
    config: dict[str, Any]
    fraction: float
    start_seconds: int
    markov_rank: int

    @property
    def layers(self) -> int:
        """All of the decoder's."""
        return int(self.config["num_hidden_layers"])


MODELS = {
    "flash": Released("DeepSeek-V4-Flash", FLASH, fraction=0.8, start_seconds=600, markov_rank=256),
    "pro": Released("DeepSeek-V4-Pro", PRO, fraction=0.85, start_seconds=1800, markov_rank=512),
}


def config_of(
    model: Released,
    format: TinyFormat,
    layers: int | None = None,
    draft: TinyDraft = TinyDraft.MTP,
    draft_weights: DraftWeights = DraftWeights.NVFP4,
) -> dict[str, Any]:
    """config.json in a storage, with the first ``layers``, all unless given, and the fields of a draft.

    ``draft_weights`` counts where the decoder is full NVFP4; other formats have one storage of drafts each.
    """
    count = model.layers if layers is None else layers
    ratios = model.config["compress_ratios"][:count]
    fields = config_json(model.config, num_hidden_layers=count, compress_ratios=ratios)
    given = {name: fields[name] for name in fields if name in BASE or name == "compress_ratios"}
    config = tiny_config(format, given, draft=draft)
    if format is TinyFormat.NVFP4_FULL and draft_weights is DraftWeights.NVFP4:
        config["quantization_config"]["ignore"].remove(modelopt_words.DRAFTS)
    elif format is TinyFormat.NVFP4_FULL:  # what is ignored is as DeepSeek's words say, with expert_dtype of experts
        config["quantization_config"] |= modelopt_words.FP8_BLOCKS
    if draft is TinyDraft.DSPARK:
        config |= {"dspark_markov_rank": model.markov_rank, "dspark_noise_token_id": NOISE_ID}
    return config


def write_released(
    folder: Path,
    model: Released,
    format: TinyFormat,
    layers: int | None = None,
    draft: TinyDraft = TinyDraft.MTP,
    draft_weights: DraftWeights = DraftWeights.NVFP4,
) -> Path:
    """Write config.json, generation_config.json and a tokenizer of the model's vocabulary to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(model, format, layers, draft, draft_weights)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}')
    write_tokenizer(folder, model.config["vocab_size"], model.config["max_position_embeddings"])
    return folder
