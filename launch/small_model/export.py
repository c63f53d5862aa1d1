"""The trained network as a checkpoint: DeepSeek's layout, names and dtypes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nvfp4_sgl.checkpoint import checksums
from nvfp4_sgl.checkpoint.drafts import DraftKind, draft_specs, verify_draft
from nvfp4_sgl.checkpoint.names import MTP_PREFIX, Role, TensorSpec, mtp_specs, tensor_specs
from nvfp4_sgl.checkpoint.transformers_names import original_name
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import ModelConfig, read_config_json
from nvfp4_sgl.synthetic.tiny_config import generation_config
from nvfp4_sgl.synthetic.tokenizer import write_tokenizer
from small_model.drafts import BLOCK, NOISE_TOKEN, RANK, STAGES, Drafts, DsparkBlocks, captured_layers
from small_model.network import DraftBlock, SmallModel, raw_config

WEIGHTS = "model.safetensors"


def stored_tensors(model: SmallModel) -> dict[str, Tensor]:
    """Every tensor by DeepSeek's name: BF16, but FP32 and int64 where the releases have these."""
    config = ModelConfig.from_dict(raw_config(), source="small model")
    return _stored(named_tensors(model), tensor_specs(config) | mtp_specs(config))


def _stored(found: Mapping[str, Tensor], specified: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Tensors in the dtypes that files have."""
    specs = {spec.key: spec for spec in specified.values()}
    if found.keys() != specs.keys():
        raise ValueError(
            f"expected the tensors of the specification, found others: {sorted(found.keys() ^ specs.keys())}"
        )
    dtypes = {Role.FP32: torch.float32, Role.TID2EID: torch.int64}
    return {
        name: found[name].detach().to("cpu", dtypes.get(spec.role, torch.bfloat16)).contiguous()
        for name, spec in specs.items()
    }


def named_tensors(model: SmallModel) -> dict[str, Tensor]:
    """Every tensor in its dtype by DeepSeek's name; views of the model's."""
    return _named(model.decoder.state_dict()) | mtp_tensors(model.mtp)


def mtp_tensors(draft: DraftBlock) -> dict[str, Tensor]:
    """The same of an MTP block."""
    return _layer(draft.block, "mtp.0") | {
        f"mtp.0.{_head(name)}": tensor for name, tensor in draft.state_dict().items() if not name.startswith("block.")
    }


def dspark_tensors(draft: DsparkBlocks) -> dict[str, Tensor]:
    """The same of a DSpark draft."""
    named, last = dict[str, Tensor](), f"mtp.{len(draft.stages) - 1}"
    for stage, layer in enumerate(draft.stages):
        named |= _layer(layer, f"mtp.{stage}")
    renamed = {f"markov_w{i}": f"markov_head.markov_w{i}.weight" for i in (1, 2)}
    renamed["confidence.weight"] = "confidence_head.proj.weight"
    for name, tensor in draft.state_dict().items():
        if not name.startswith("stages."):
            stem = "mtp.0" if name.startswith("main_") else last
            named[f"{stem}.{renamed.get(name, _head(name))}"] = tensor
    return named


def _head(name: str) -> str:
    return name.replace("hc_head.hc_", "hc_head_")


def _layer(layer: nn.Module, stem: str) -> dict[str, Tensor]:
    """A layer's tensors, under names that begin with ``stem``."""
    states = {f"model.layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    return {name.replace("layers.0", stem, 1): tensor for name, tensor in _named(states).items()}


def _named(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """DeepSeek's names of what transformers' modules hold."""
    named = {}
    for name, tensor in states.items():
        for part, value in _split(name, tensor):
            original = original_name(part)
            if original is None:
                raise ValueError(f"'{part}' has no original name")
            named[original] = value
    return named


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
        _write(directory / name, value)
    write_tokenizer(directory, raw["vocab_size"], raw["max_position_embeddings"])
    save_file(stored_tensors(model), directory / WEIGHTS, metadata={"format": "pt"})
    (directory / WEIGHTS).chmod(0o644)  # safetensors leaves it readable by its owner alone
    verify(directory)


def with_draft(raw: Mapping[str, Any], kind: DraftKind) -> dict[str, Any]:
    """config.json of a checkpoint that bundles a draft of that kind."""
    layers = raw["num_hidden_layers"]
    plain = {name: value for name, value in raw.items() if not name.startswith("dspark_")}
    ratios = {"compress_ratios": [*raw["compress_ratios"][:layers], *[0] * (STAGES if kind is DraftKind.DSPARK else 1)]}
    if kind is DraftKind.MTP:
        return plain | ratios
    return (
        plain
        | ratios
        | {
            "dspark_block_size": BLOCK,
            "dspark_markov_rank": RANK,
            "dspark_noise_token_id": NOISE_TOKEN,
            "dspark_target_layer_ids": captured_layers(dict(raw)),
        }
    )


def save_drafts(drafts: Drafts, raw: Mapping[str, Any], directory: Path) -> dict[DraftKind, Path]:
    """Write each draft's tensors to a file of their own in ``directory``."""
    found = {DraftKind.MTP: mtp_tensors(drafts.mtp), DraftKind.DSPARK: dspark_tensors(drafts.dspark)}
    files = {}
    for kind, tensors in found.items():
        fields = with_draft(raw, kind)
        specs = draft_specs(kind, fields, ModelConfig.from_dict(fields, source="small model"))
        files[kind] = directory / f"{kind.value.lower()}.safetensors"
        save_file(_stored(tensors, specs), files[kind], metadata={"format": "pt"})
    return files


def bundle(target: Path, draft: Path, kind: DraftKind, directory: Path) -> None:
    """Write to ``directory`` the checkpoint ``target`` with another draft; the decoder's tensors stay as they are.

    Args:
        draft: what :func:`save_drafts` wrote.
    """
    shutil.copytree(target, directory, ignore=shutil.ignore_patterns("*.safetensors", "README.md"), dirs_exist_ok=True)
    tensors = load_file(draft)
    for file in target.glob("*.safetensors"):
        tensors |= {name: tensor for name, tensor in load_file(file).items() if not name.startswith(MTP_PREFIX)}
    weights = "model-00001-of-00001.safetensors"
    save_file(tensors, directory / weights, metadata={"format": "pt"})
    (directory / weights).chmod(0o644)
    fields = with_draft(read_config_json(target), kind)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write(directory / "config.json", fields)
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), weights)}
    _write(directory / "model.safetensors.index.json", index)
    if (manifest := directory / checksums.FILE).exists():
        sums = {
            name: hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy()).hexdigest()
            for name, tensor in sorted(tensors.items())
        }
        _write(manifest, json.loads(manifest.read_text(encoding="utf-8")) | {checksums.TENSORS: sums})
    verified = verify(directory)
    verify_draft(verified.inventory, verified.raw, verified.config)


def _write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
