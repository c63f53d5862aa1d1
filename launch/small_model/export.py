"""The trained network as a checkpoint: DeepSeek's layout, names and dtypes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4_sgl.checkpoint.names import Role, mtp_specs, tensor_specs
from nvfp4_sgl.checkpoint.transformers_names import original_name
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.synthetic.tiny_config import generation_config
from nvfp4_sgl.synthetic.tokenizer import write_tokenizer
from small_model.network import SmallModel, raw_config

WEIGHTS = "model.safetensors"


def stored_tensors(model: SmallModel) -> dict[str, Tensor]:
    """Every tensor by DeepSeek's name: BF16, but FP32 and int64 where the releases have these."""
    config = ModelConfig.from_dict(raw_config(), source="small model")
    specs = {spec.key: spec for spec in (tensor_specs(config) | mtp_specs(config)).values()}
    found = named_tensors(model)
    if found.keys() != specs.keys():
        raise ValueError(
            f"expected the tensors of the specification, found others: {sorted(found.keys() ^ specs.keys())}"
        )
    dtypes = {Role.FP32: torch.float32, Role.TID2EID: torch.int64}
    return {
        name: found[name].detach().to(dtypes.get(spec.role, torch.bfloat16)).contiguous()
        for name, spec in specs.items()
    }


def named_tensors(model: SmallModel) -> dict[str, Tensor]:
    """Every tensor in its dtype by DeepSeek's name."""
    named = {}
    layers = model.config.num_hidden_layers
    states = {**model.decoder.state_dict(), **_as_layer(model, layers)}
    for name, tensor in states.items():
        for part, value in _split(name, tensor):
            original = original_name(part)
            if original is None:
                raise ValueError(f"'{part}' has no original name")
            named[original.replace(f"layers.{layers}.", "mtp.0.")] = value
    for name, tensor in model.mtp.state_dict().items():
        if not name.startswith("block."):
            named[f"mtp.0.{name.replace('hc_head.hc_', 'hc_head_')}"] = tensor
    return named


def _as_layer(model: SmallModel, number: int) -> dict[str, Tensor]:
    """The MTP block's layer under the name of layer ``number`` of the decoder."""
    return {f"model.layers.{number}.{name}": tensor for name, tensor in model.mtp.block.state_dict().items()}


def _split(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Stacked experts one by one; everything else as it is."""
    stem, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        halves = [both.chunk(2) for both in tensor]
        return [
            (f"{stem}.{expert}.{part}_proj.weight", half)
            for expert, pair in enumerate(halves)
            for part, half in zip(("gate", "up"), pair, strict=True)
        ]
    if last == "down_proj":
        return [(f"{stem}.{expert}.down_proj.weight", down) for expert, down in enumerate(tensor)]
    return [(name, tensor)]


def write_checkpoint(model: SmallModel, directory: Path) -> None:
    """Write the BF16 checkpoint to ``directory``, and verify it; FileExistsError if there is something."""
    directory.mkdir(parents=True)
    raw = raw_config()
    for name, value in (("config.json", raw), ("generation_config.json", generation_config())):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(directory, raw["vocab_size"], raw["max_position_embeddings"])
    save_file(stored_tensors(model), directory / WEIGHTS, metadata={"format": "pt"})
    (directory / WEIGHTS).chmod(0o644)  # safetensors leaves it readable by its owner alone
    verify(directory)
