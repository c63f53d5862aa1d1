"""transformers' DeepSeek-V4 on a checkpoint's dequantised weights: what every result is compared with."""

from __future__ import annotations

import json
import re
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import DeepseekV4ForCausalLM

from tests.support.dequantize import dequantize_checkpoint


def hf_model(directory: str | Path) -> DeepseekV4ForCausalLM:
    """The checkpoint in ``directory`` as an fp32, eager transformers model; every parameter comes from the files."""
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config["torch_dtype"] = "float32"
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        merged = _merged(dequantize_checkpoint(directory))
        weights = {name: np.ascontiguousarray(array) for name, array in merged.items()}
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
        return load_strictly(copy)


_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def _merged(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts under transformers' names, stacked as its modules hold them; what has other names stays as it is.

    Everything else under these names is loaded by transformers with no renaming at all.
    """
    experts: dict[str, dict[tuple[int, str], np.ndarray]] = {}
    result = {}
    for name, array in weights.items():
        if found := _EXPERT.fullmatch(name):
            experts.setdefault(found[1], {})[int(found[2]), found[3]] = array
        else:
            result[name] = array
    for stem, matrices in experts.items():
        count = len(matrices) // 3
        both = [np.concatenate([matrices[e, "gate"], matrices[e, "up"]]) for e in range(count)]
        result[f"{stem}.gate_up_proj"] = np.stack(both)
        result[f"{stem}.down_proj"] = np.stack([matrices[e, "down"] for e in range(count)])
    return result


@lru_cache(maxsize=4)
def cached_hf_model(directory: Path) -> DeepseekV4ForCausalLM:
    """:func:`hf_model`, once for each directory and process."""
    return hf_model(directory)


def load_strictly(directory: Path) -> DeepseekV4ForCausalLM:
    """transformers' own loading in fp32, eager; fails unless every parameter was in the files and all was used."""
    model, info = DeepseekV4ForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    unexpected = [name for name in info["unexpected_keys"] if not name.startswith(("mtp.", "model.mtp."))]
    assert not info["missing_keys"] and not unexpected and not info["mismatched_keys"], info
    # Whatever storage transformers chose for a parameter, it computes in fp32 here.
    return model.to(torch.float32).eval()


@torch.no_grad()
def hf_logits(model: DeepseekV4ForCausalLM, ids: list[int] | torch.Tensor) -> torch.Tensor:
    """fp32 logits [T, vocab] of one sequence, computed at once without a cache."""
    return model(torch.as_tensor(ids)[None], use_cache=False).logits[0].float()
