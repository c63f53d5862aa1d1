"""Storages of matrices by config.json alone, where there are no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvfp4_sgl.checkpoint.decoders import Writer
from nvfp4_sgl.checkpoint.exporters import EXPERT_DTYPES, FP8, MXFP4, NVFP4, PLAIN, Claims, read_claims
from nvfp4_sgl.checkpoint.names import Role, TensorSpec, tensor_specs
from nvfp4_sgl.checkpoint.quantization import is_allowed
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import ConfigError


def claimed_storages(
    raw: Mapping[str, Any], config: ModelConfig, tensors: Mapping[str, TensorSpec] | None = None
) -> dict[str, Storage]:
    """Storage of every matrix by its stem: NVFP4, unless ``quantization_config`` says another.

    Args:
        tensors: the decoder's unless given.

    Raises:
        ConfigError: words that are not understood, or that contradict each other; or compressed-tensors.
    """
    specs = [spec for spec in (tensors or tensor_specs(config)).values() if spec.role.is_matrix]
    quantization = raw.get("quantization_config")
    if quantization is None:
        return {spec.name: Storage.NVFP4 for spec in specs}
    claims = read_claims(quantization, raw.get("expert_dtype"))
    if claims.writer is Writer.COMPRESSED_TENSORS:
        raise ConfigError(
            f"{claims.source}': random weights are drawn in ModelOpt's and DeepSeek's storages, found"
            " compressed-tensors; for random weights all in NVFP4 remove the field, or pass --json-model-override-args"
            " '{\"quantization_config\": null}'"
        )
    return {spec.name: _claimed(claims, spec, raw.get("expert_dtype")) for spec in specs}


def _claimed(claims: Claims, spec: TensorSpec, expert_dtype: object) -> Storage:
    """The storage that all statements about a matrix allow; where they leave a choice, what its writer would choose."""
    said = [statement for statement in claims.statements if statement.speaks_of(spec)]
    allowed = [storage for storage in Storage if all(is_allowed(claims, statement, storage) for statement in said)]
    if not allowed:
        fields = ", ".join(f"'{statement.field}'" for statement in said)
        raise ConfigError(
            f"{claims.source}': expected fields that agree on '{spec.key}', found none that {fields} allow;"
            " correct them, or remove the field for random weights in NVFP4"
        )
    preferred = (_writers_choice(claims, spec, expert_dtype), PLAIN, NVFP4, MXFP4)
    by_scheme = {storage.decoder.scheme: storage for storage in allowed}
    return next((by_scheme[scheme] for scheme in preferred if scheme in by_scheme), allowed[-1])


def _writers_choice(claims: Claims, spec: TensorSpec, expert_dtype: object) -> str:
    """The scheme of a matrix that nothing is said about: in DeepSeek's words that of its releases."""
    if claims.raw.get("quant_method") != "fp8" or "compressor." in spec.name:
        return PLAIN
    dtype = claims.raw.get("expert_dtype") or expert_dtype
    if spec.role is Role.EXPERT_LINEAR and isinstance(dtype, str):
        return next(iter(EXPERT_DTYPES.get(dtype, {FP8})))
    return FP8
