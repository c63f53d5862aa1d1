"""Hold config.json's ``quantization_config`` against what the tensors are. Source: DEEPSEEK_V4.md §8.2.

The tensors decide how they are read; the configuration may only agree. What it claims in words that are not known here
could mean anything (a rotation, a pre-scale), so it is refused rather than ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from typing import Any

from nvfp4_sgl.checkpoint.names import MTP_PREFIX, Storage
from nvfp4_sgl.checkpoint.summary import CheckpointSummary
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.files import shown

QUANT_METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed", "fp8")
QUANT_ALGOS = ("NVFP4", "MIXED_PRECISION", "FP8")
MOE_QUANT_ALGOS = ("NVFP4", "FP8")
KV_CACHE_QUANT_ALGOS = ("FP8",)
"""What the cache holds here is decided here; an exporter's wish for FP8 asks for nothing else."""

FIELDS = {
    *("quant_method", "quant_algo", "moe_quant_algo", "kv_cache_quant_algo", "group_size", "quantized_layers"),
    *("ignore", "exclude_modules", "producer"),
    *("activation_scheme", "fmt", "scale_fmt", "weight_block_size"),
}
"""Fields of ``quantization_config`` that are understood. Another one may mean a rotation or a pre-scale."""


def check_quantization_config(raw_config: Mapping[str, Any], summary: CheckpointSummary) -> None:
    """Refuse a ``quantization_config`` that is not understood or that contradicts the tensors.

    Args:
        raw_config: config.json. Without ``quantization_config`` nothing is claimed, and nothing is checked.
        summary: of the verified tensors.

    Raises:
        ConfigError: names the field, what was expected and what was found.
    """
    quantization = raw_config.get("quantization_config")
    if quantization is None:
        return
    if not isinstance(quantization, Mapping):
        raise ConfigError(f"config.json: field 'quantization_config': expected an object, found {shown(quantization)}")
    for field, value in quantization.items():
        if field not in FIELDS:
            raise _error(str(field), f"one of the fields {', '.join(sorted(FIELDS))}", value)
    method = _known(quantization, "quant_method", QUANT_METHODS)
    algo = _known(quantization, "quant_algo", QUANT_ALGOS)
    moe_algo = _known(quantization, "moe_quant_algo", MOE_QUANT_ALGOS)
    _known(quantization, "kv_cache_quant_algo", KV_CACHE_QUANT_ALGOS)
    _known(quantization, "fmt", ("e4m3",))
    _known(quantization, "activation_scheme", ("dynamic",))
    if method is None and algo is None:
        raise _error("quant_method", f"one of {', '.join(QUANT_METHODS)}", None)
    found = set(summary.storages.values())
    if Storage.NVFP4 in found and quantization.get("group_size", 16) != 16:
        raise _error("group_size", "16, as the tensors are NVFP4", quantization["group_size"])
    if Storage.FP8 in found and quantization.get("weight_block_size", [128, 128]) != [128, 128]:
        raise _error("weight_block_size", "[128, 128]", quantization["weight_block_size"])
    if quantization.get("scale_fmt", "ue8m0") != "ue8m0":
        raise _error("scale_fmt", "ue8m0", quantization["scale_fmt"])
    if algo == "NVFP4":
        _check_ignored(quantization, summary, summary.storages)
    elif algo == "MIXED_PRECISION":
        experts = [stem for stem in summary.storages if ".experts." in stem]
        if moe_algo is not None:
            _demand(summary, experts, Storage(moe_algo), "moe_quant_algo", moe_algo)
        _check_ignored(quantization, summary, ())
    elif Storage.NVFP4 in found:
        stem = next(stem for stem, storage in summary.storages.items() if storage is Storage.NVFP4)
        raise _error("quant_algo", f"NVFP4 or MIXED_PRECISION, as tensor '{stem}.weight' is NVFP4", algo)
    _check_quantized_layers(quantization, summary)
    if not found - {Storage.PLAIN}:
        raise _error("quant_algo", "no quantization_config, as no tensor is quantised", algo or method)


def _known(quantization: Mapping[str, Any], field: str, known: tuple[str, ...]) -> str | None:
    value = quantization.get(field)
    if value is not None and not (isinstance(value, str) and value in known):
        raise _error(field, f"one of {', '.join(known)}", value)
    return value


def _error(field: str, expected: str, found: object) -> ConfigError:
    return ConfigError(
        f"config.json: field 'quantization_config.{field}': expected {expected}, found {shown(found)};"
        " correct the field or use the checkpoint that it describes"
    )


def _demand(summary: CheckpointSummary, stems: Iterable[str], storage: Storage, field: str, value: str) -> None:
    for stem in stems:
        if summary.storages[stem] is not storage:
            found = summary.storages[stem].value
            raise _error(field, f"what the tensors are ('{stem}.weight' is stored {found})", value)


def _check_quantized_layers(quantization: Mapping[str, Any], summary: CheckpointSummary) -> None:
    """Each entry of ``quantized_layers``, by name or by the name of what it is part of, is stored as it says."""
    layers = quantization.get("quantized_layers", {})
    if not isinstance(layers, Mapping):
        raise _error("quantized_layers", "an object", layers)
    known = {storage.value: storage for storage in Storage if storage is not Storage.PLAIN}
    for name, said in layers.items():
        if name.startswith(MTP_PREFIX):
            continue
        algo = said.get("quant_algo") if isinstance(said, Mapping) else None
        field = f"quantized_layers.{name}"
        if not isinstance(algo, str) or algo not in known:
            raise _error(field, f"an object with quant_algo {' or '.join(known)}", said)
        if algo == Storage.NVFP4.value and said.get("group_size", 16) != 16:
            raise _error(field, "group_size 16", said)
        stems = [stem for stem in summary.storages if f"{stem}.".startswith(f"{name}.")]
        if not stems:
            raise _error(field, "the name of a matrix, or of a module that has some", said)
        _demand(summary, stems, known[algo], field, algo)


def _check_ignored(quantization: Mapping[str, Any], summary: CheckpointSummary, quantised: Iterable[str]) -> None:
    """NVFP4 exactly where ``ignore`` does not apply among ``quantised``; nowhere where it does."""
    field = "ignore" if "ignore" in quantization else "exclude_modules"
    patterns = quantization.get(field) or []
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise _error(field, "a list of patterns", patterns)
    ignored = re.compile("|".join(translate(pattern) for pattern in patterns) or r"(?!)")
    for stem, storage in summary.storages.items():
        if storage is Storage.NVFP4 and ignored.match(stem):
            raise _error(field, f"no pattern that matches '{stem}', as its tensors are NVFP4", patterns)
    for stem in quantised:
        if summary.storages[stem] is not Storage.NVFP4 and not ignored.match(stem):
            raise _error(
                "quant_algo",
                f"'{stem}.weight' in NVFP4 or matched by '{field}'; it is stored {summary.storages[stem].value}",
                quantization.get("quant_algo"),
            )
