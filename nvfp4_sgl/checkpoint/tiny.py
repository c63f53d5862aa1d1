"""Write small, complete, deterministic DeepSeek-V4 checkpoints.

The same arguments give byte-identical files. Layout, names and dtypes are those of the real releases, so everything
that serves a tiny checkpoint goes the way that a real one goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4_sgl.checkpoint.names import Role, TensorSpec, mtp_specs, tensor_specs
from nvfp4_sgl.checkpoint.summary import CheckpointSummary
from nvfp4_sgl.checkpoint.tiny_config import TinyFormat, generation_config, tiny_config
from nvfp4_sgl.checkpoint.tiny_weights import draw
from nvfp4_sgl.checkpoint.tokenizer import write_tokenizer
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.formats import fp8_block, mxfp4, nvfp4

MARKER = "nvfp4_sgl_tiny.json"
"""Marks a directory as written by this module; only such a directory is ever overwritten."""

UNTIED_UP_FACTOR = 1.37
"""Where gate and up keep scales of their own, up's is also this much larger than its maximum needs."""

INPUT_SCALE = 8.0 / nvfp4.FULL_SCALE
"""A calibration constant as an exporter would write it, for activations up to 8. Nothing here reads it."""


def write_tiny(
    directory: str | Path,
    format: TinyFormat | str,
    seed: int = 0,
    *,
    force: bool = False,
    shards: int = 3,
    **overrides: Any,
) -> CheckpointSummary:
    """Write a tiny checkpoint with tokenizer and configuration; returns what its own verification found.

    Args:
        directory: created if absent; must be empty, or with ``force`` an earlier tiny checkpoint.
        format: storage of the matrices.
        seed: of all weights.
        force: replace an earlier tiny checkpoint.
        shards: number of safetensors files.
        overrides: config.json fields to replace (see :func:`tiny_config`).
    """
    directory, format = Path(directory), TinyFormat(format)
    raw = tiny_config(format, overrides)
    config = ModelConfig.from_dict(raw, source="tiny checkpoint")
    _prepare(directory, force)
    _write_json(directory / MARKER, {"format": format.value, "seed": seed, "overrides": overrides})
    _write_json(directory / "config.json", raw)
    _write_json(directory / "generation_config.json", generation_config())
    write_tokenizer(directory, config.vocab_size, config.max_position_embeddings)
    _write_shards(directory, dict(_tensors(config, format, seed)), shards)
    return verify(directory).summary


def _prepare(directory: Path, force: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if not any(directory.iterdir()):
        return
    if not force:
        raise CheckpointError(f"{directory}: not empty; name an empty directory, or pass --force to replace")
    if not (directory / MARKER).is_file():
        raise CheckpointError(f"{directory}: holds files but no {MARKER}; only a tiny checkpoint is ever replaced")
    for file in (*directory.glob("*.safetensors"), *directory.glob("*.json")):
        file.unlink()


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_shards(directory: Path, tensors: dict[str, Tensor], count: int) -> None:
    total = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    written = 0
    for name, tensor in tensors.items():
        parts[min(written * count // total, count - 1)][name] = tensor
        written += tensor.nbytes
    weight_map: dict[str, str] = {}
    for index, part in enumerate(parts):
        file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # safetensors leaves it readable by its owner alone
        weight_map |= dict.fromkeys(part, file)
    index_json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / "model.safetensors.index.json", index_json)


def _tensors(config: ModelConfig, format: TinyFormat, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor by name, in the order of the model."""
    specs = tensor_specs(config)
    for index in range(config.num_nextn_predict_layers):
        specs |= mtp_specs(config, index)

    def weight(name: str) -> Tensor:
        return draw(specs[name], seed, experts=config.n_routed_experts)

    for spec in specs.values():
        w = weight(spec.name)
        if not spec.role.is_matrix or _is_plain(spec, format):
            yield spec.key, w
        elif spec.name.startswith("mtp.") and spec.role is Role.EXPERT_LINEAR:
            yield from _mxfp4(spec.name, w)
        elif spec.role is Role.EXPERT_LINEAR or format is TinyFormat.NVFP4_FULL:
            sibling = _tied_with(spec.name)
            yield from _nvfp4(spec.name, w, None if sibling is None else weight(sibling))
        else:
            yield from _fp8(spec.name, w)


def _is_plain(spec: TensorSpec, format: TinyFormat) -> bool:
    if format is TinyFormat.NVFP4_FULL:
        return spec.name.startswith("mtp.")
    return format is TinyFormat.BF16 or "compressor." in spec.name


def _tied_with(stem: str) -> str | None:
    """The matrix whose maximum enters ``stem``'s global scale too: gate for up and up for gate, unless untied."""
    owner, _, matrix = stem.rpartition(".")
    if matrix not in ("w1", "w3") or _is_untied(owner):
        return None
    return f"{owner}.{'w3' if matrix == 'w1' else 'w1'}"


def _is_untied(owner: str) -> bool:
    """Every fourth expert, and the shared expert of odd layers, keep separate scales for gate and up."""
    parts = owner.split(".")
    return int(parts[-1]) % 4 == 1 if parts[-2] == "experts" else int(parts[1]) % 2 == 1


def _nvfp4(stem: str, w: Tensor, sibling: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    amax = w.float().abs().amax()
    if sibling is not None:
        amax = torch.maximum(amax, sibling.float().abs().amax())
    elif stem.endswith(".w3"):
        amax = amax * UNTIED_UP_FACTOR
    stored = nvfp4.quantize_weight(w, amax / nvfp4.FULL_SCALE)
    yield f"{stem}.weight", stored.packed
    yield f"{stem}.weight_scale", stored.block_scale
    yield f"{stem}.weight_scale_2", stored.global_scale
    yield f"{stem}.input_scale", torch.tensor(INPUT_SCALE, dtype=torch.float32)


def _fp8(stem: str, w: Tensor) -> Iterator[tuple[str, Tensor]]:
    stored = fp8_block.quantize_weight(w)
    yield f"{stem}.weight", stored.weight
    yield f"{stem}.scale", stored.scale.view(torch.float8_e8m0fnu)


def _mxfp4(stem: str, w: Tensor) -> Iterator[tuple[str, Tensor]]:
    stored = mxfp4.quantize(w)
    yield f"{stem}.weight", stored.packed.view(torch.int8)
    yield f"{stem}.scale", stored.scale.view(torch.float8_e8m0fnu)
