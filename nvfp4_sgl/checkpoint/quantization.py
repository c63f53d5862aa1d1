"""Compare what exporters say about a checkpoint with its tensors.

The tensors decide how they are read; ``quantization_config`` in config.json and ``hf_quant_config.json`` may only
agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvfp4_sgl.checkpoint.exporters import NVFP4, Claims, Statement, read_claims, read_manifest
from nvfp4_sgl.checkpoint.names import TensorSpec
from nvfp4_sgl.checkpoint.patterns import modules_around
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.summary import CheckpointSummary
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.files import MAX_CONFIG_BYTES, read_json, shown

MANIFEST = "hf_quant_config.json"
"""What ModelOpt writes beside config.json."""


def check_quantization_config(raw_config: Mapping[str, Any], summary: CheckpointSummary) -> None:
    """Refuse a ``quantization_config`` that is not understood or that contradicts the tensors.

    Args:
        raw_config: config.json. Without ``quantization_config`` nothing is claimed, and nothing is checked.
        summary: of the verified tensors.

    Raises:
        ConfigError: names the field, what was expected and what was found.
    """
    quantization = raw_config.get("quantization_config")
    if quantization is not None:
        _check(read_claims(quantization, raw_config.get("expert_dtype")), summary)


def check_manifest(directory: Path, summary: CheckpointSummary) -> None:
    """As :func:`check_quantization_config` for ``hf_quant_config.json``, if it is there."""
    file = directory / MANIFEST
    if file.exists():
        manifest = read_json(file, ConfigError, MAX_CONFIG_BYTES, "fetch it again, or remove it")
        _check(read_manifest(manifest, str(file)), summary)


def is_allowed(claims: Claims, statement: Statement, storage: Storage) -> bool:
    """Whether a matrix of which ``statement`` speaks may be in ``storage``."""
    return storage.decoder.scheme in statement.schemes and claims.writer in storage.decoder.writers


def _check(claims: Claims, summary: CheckpointSummary) -> None:
    for stem, storage in summary.storages.items():
        spec = summary.specs[stem]
        for statement in claims.statements:
            if statement.speaks_of(spec) and not is_allowed(claims, statement, storage):
                raise _contradiction(claims, statement, spec, storage)
    around = {module for stem in summary.storages for module in modules_around(stem)} if claims.listed else set()
    for name, field in claims.listed.items():
        if name not in around:
            raise claims.error(field, "the name of a matrix, or of a module that has some", name)
    if all(storage is Storage.PLAIN for storage in summary.storages.values()):
        field = "quant_algo" if claims.raw.get("quant_algo") else "quant_method"
        raise claims.error(field, "no such object, as no tensor is quantised", claims.raw.get(field))


def _contradiction(claims: Claims, statement: Statement, spec: TensorSpec, storage: Storage) -> ConfigError:
    if statement.field == "quant_algo" and NVFP4 not in statement.schemes:
        expected = f"NVFP4 or MIXED_PRECISION, as tensor '{spec.key}' is {storage.value}"
        return claims.error("quant_algo", expected, statement.value)
    field = statement.field
    if field == "quantized_layers":
        field = next(claims.listed[module] for module in modules_around(spec.name) if module in claims.listed)
    said = " or ".join(scheme or "plain" for scheme in sorted(statement.schemes, reverse=True))
    return ConfigError(
        f"{claims.source}.{field}': expected '{spec.key}' in {said} as {claims.writer.value} writes it, found it stored"
        f" as {storage.value}; the field is {shown(statement.value)}: correct it or use the checkpoint that it"
        " describes"
    )
