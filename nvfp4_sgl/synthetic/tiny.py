"""Write small, complete, deterministic DeepSeek-V4 checkpoints.

The same arguments give byte-identical files. Layout, names and dtypes are those of the real releases, so everything
that serves a tiny checkpoint goes the way that a real one goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4_sgl.checkpoint.drafts import DraftKind, draft_specs
from nvfp4_sgl.checkpoint.names import MTP_PREFIX, Role, TensorSpec, tensor_specs
from nvfp4_sgl.checkpoint.quantization import MANIFEST
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.summary import CheckpointSummary
from nvfp4_sgl.checkpoint.transformers_names import transformers_name
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.synthetic import tiny_storage
from nvfp4_sgl.synthetic.tiny_config import (
    TinyDraft,
    TinyFormat,
    TinyNames,
    bundled_draft,
    generation_config,
    manifest,
    tiny_config,
)
from nvfp4_sgl.synthetic.tiny_folder import MARKER, require_replaceable
from nvfp4_sgl.synthetic.tiny_weights import draw
from nvfp4_sgl.synthetic.tokenizer import write_tokenizer
from nvfp4_sgl.terminal import Counter


def write_tiny(
    directory: str | Path,
    format: TinyFormat | str,
    seed: int = 0,
    *,
    force: bool = False,
    shards: int = 3,
    names: TinyNames | str = TinyNames.ORIGINAL,
    draft: TinyDraft | str | None = None,
    progress: Counter | None = None,
    **overrides: Any,
) -> CheckpointSummary:
    """Write a tiny checkpoint with tokenizer and configuration; returns what its own verification found.

    Args:
        directory: created if absent; must be empty, or with ``force`` an earlier tiny checkpoint.
        format: storage of the matrices.
        seed: of all weights.
        force: replace an earlier tiny checkpoint.
        shards: number of safetensors files.
        names: of the tensors.
        draft: what is bundled under ``mtp.``; unless given MTP, where the format's exporter keeps drafts.
        progress: counts the tensors that are drawn.
        overrides: config.json fields to replace (see :func:`tiny_config`).
    """
    directory, format, names = Path(directory), TinyFormat(format), TinyNames(names)
    kind = None if draft is None else TinyDraft(draft)
    raw = tiny_config(format, overrides, names, kind)
    config = ModelConfig.from_dict(raw, source="tiny checkpoint")
    require_replaceable(directory, force)
    directory.mkdir(parents=True, exist_ok=True)
    for file in (*directory.glob("*.safetensors"), *directory.glob("*.json")):
        file.unlink()
    _write_json(
        directory / MARKER,
        {"format": format.value, "names": names.value, "seed": seed, "overrides": overrides}
        | ({} if kind is None else {"draft": kind.value}),
    )
    _write_json(directory / "config.json", raw)
    _write_json(directory / "generation_config.json", generation_config())
    if (described := manifest(format, raw)) is not None:
        _write_json(directory / MANIFEST, described)
    write_tokenizer(directory, config.vocab_size, config.max_position_embeddings)
    tensors = {}
    for name, tensor in _tensors(_specs(raw, config, format), config, format, names, seed):
        tensors[name] = tensor
        if progress is not None:
            progress.advance()
    _write_shards(directory, tensors, shards)
    return verify(directory).summary


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


def _tensors(
    specs: Mapping[str, TensorSpec], config: ModelConfig, format: TinyFormat, names: TinyNames, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor by its name in the file, in the order of the model."""
    for name, tensor in _original_tensors(specs, config, format, names, seed):
        renamed = transformers_name(name) if names is TinyNames.TRANSFORMERS else name
        assert renamed is not None, name
        yield renamed, tensor


def _specs(raw: Mapping[str, Any], config: ModelConfig, format: TinyFormat) -> dict[str, TensorSpec]:
    """Every logical tensor, a draft's included."""
    specs = tensor_specs(config)
    draft = bundled_draft(raw, format)
    return specs if draft is TinyDraft.NONE else specs | draft_specs(DraftKind[draft.name], raw, config)


def _original_tensors(
    specs: Mapping[str, TensorSpec], config: ModelConfig, format: TinyFormat, names: TinyNames, seed: int
) -> Iterator[tuple[str, Tensor]]:
    scale = "scale" if names is TinyNames.ORIGINAL else "weight_scale_inv"

    def weight(name: str) -> Tensor:
        return draw(specs[name], seed, experts=config.n_routed_experts)

    for spec in specs.values():
        stem, w = spec.name, weight(spec.name)
        sibling = _tied_with(stem) if spec.role.is_matrix else None
        tied = None if sibling is None else weight(sibling)
        if not spec.role.is_matrix:
            yield spec.key, w
            continue
        match storage(spec, format):
            case Storage.NVFP4:
                yield from tiny_storage.modelopt_nvfp4(stem, w, tied)
            case Storage.NVFP4_COMPRESSED:
                yield from tiny_storage.compressed_nvfp4(stem, w, tied)
            case Storage.FP8:
                yield from tiny_storage.fp8(stem, w, scale)
            case Storage.FP8_FLOAT_SCALES if format is TinyFormat.COMPRESSED_TENSORS:
                yield from tiny_storage.fp8_float(stem, w, "weight_scale", torch.bfloat16)
            case Storage.FP8_FLOAT_SCALES:
                yield from tiny_storage.fp8_float(stem, w, scale, torch.float32)
            case Storage.MXFP4:
                yield from tiny_storage.mxfp4_packed(stem, w, scale)
            case Storage.PLAIN:
                yield spec.key, w


def storage(spec: TensorSpec, format: TinyFormat) -> Storage:
    """The storage of a matrix of a tiny checkpoint."""
    is_expert, is_draft = spec.role is Role.EXPERT_LINEAR, spec.name.startswith(MTP_PREFIX)
    if format is TinyFormat.BF16 or (format is TinyFormat.NVFP4_FULL and is_draft):
        return Storage.PLAIN
    if format is TinyFormat.NVFP4_FULL:
        return Storage.NVFP4
    if "compressor." in spec.name:
        return Storage.PLAIN
    if format is TinyFormat.COMPRESSED_TENSORS:
        if ".shared_experts." in spec.name:
            return Storage.PLAIN
        return Storage.NVFP4_COMPRESSED if is_expert else Storage.FP8_FLOAT_SCALES
    if format is TinyFormat.DEEPSEEK_BASE:
        return Storage.FP8_FLOAT_SCALES
    if not is_expert:
        return Storage.FP8
    return Storage.NVFP4 if format is TinyFormat.NVFP4_EXPERTS and not is_draft else Storage.MXFP4


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
