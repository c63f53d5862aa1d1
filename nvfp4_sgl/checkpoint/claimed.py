"""What a config.json says its matrices are stored as, where there are no tensors to look at."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import translate
from typing import Any

from nvfp4_sgl.checkpoint.names import Role, Storage, TensorSpec, tensor_specs
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import ConfigError


def claimed_storages(raw: Mapping[str, Any], config: ModelConfig) -> dict[str, Storage]:
    """Storage of every matrix by its stem: NVFP4, unless ``quantization_config`` says another supported one.

    Nothing is checked here but what has no :class:`Storage`: hold the result against ``quantization_config`` with
    :func:`.quantization.check_quantization_config`.

    Raises:
        ConfigError: the original release's MXFP4 experts.
    """
    specs = [spec for spec in tensor_specs(config).values() if spec.role.is_matrix]
    quantization = raw.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return {spec.name: Storage.NVFP4 for spec in specs}
    algo, method = quantization.get("quant_algo"), quantization.get("quant_method")
    if method == "fp8" and algo in (None, "FP8") and raw.get("expert_dtype") == "fp4":
        raise ConfigError(
            "config.json: field 'quantization_config': FP8 with expert_dtype 'fp4' means MXFP4 experts, expected NVFP4,"
            " FP8 or BF16 ones; for random weights all in NVFP4 remove the field, or pass"
            " --json-model-override-args '{\"quantization_config\": null}'"
        )
    ignored = _pattern(quantization)
    listed = _listed(quantization)

    def claimed(spec: TensorSpec) -> Storage:
        for module in (spec.name, *_modules_around(spec.name)):
            if module in listed:
                return listed[module]
        dense = Storage.FP8 if method == "fp8" and "compressor." not in spec.name else Storage.PLAIN
        if algo == "MIXED_PRECISION":
            moe = quantization.get("moe_quant_algo")
            is_known = spec.role is Role.EXPERT_LINEAR and moe in ("NVFP4", "FP8")
            return Storage(moe) if is_known else dense
        if algo == "NVFP4" or method != "fp8":
            return Storage.PLAIN if ignored.match(spec.name) else Storage.NVFP4
        return dense

    return {spec.name: claimed(spec) for spec in specs}


def _modules_around(stem: str) -> Iterator[str]:
    """``a.b`` and ``a`` of ``a.b.c``."""
    while "." in stem:
        stem = stem.rpartition(".")[0]
        yield stem


def _pattern(quantization: Mapping[str, Any]) -> re.Pattern[str]:
    patterns = quantization.get("ignore", quantization.get("exclude_modules"))
    texts = [text for text in patterns if isinstance(text, str)] if isinstance(patterns, list) else []
    return re.compile("|".join(translate(text) for text in texts) or r"(?!)")


def _listed(quantization: Mapping[str, Any]) -> dict[str, Storage]:
    """Modules of ``quantized_layers`` whose algorithm is known."""
    layers = quantization.get("quantized_layers")
    if not isinstance(layers, Mapping):
        return {}
    algos = {name: said.get("quant_algo") for name, said in layers.items() if isinstance(said, Mapping)}
    return {name: Storage(algo) for name, algo in algos.items() if algo in ("NVFP4", "FP8")}
