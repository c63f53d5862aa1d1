"""config.json and hf_quant_config.json of what was converted, in ModelOpt's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvfp4_sgl import __version__
from nvfp4_sgl.checkpoint import modelopt_words
from nvfp4_sgl.checkpoint.classes import MODULES, MatrixClass
from nvfp4_sgl.checkpoint.exporters import EXPERT_DTYPES, FP8, MXFP4, NVFP4
from nvfp4_sgl.checkpoint.storage import Storage

PRODUCER = {"name": "modelopt", "version": f"nvfp4-sgl {__version__}"}
"""SGLang and vLLM read hf_quant_config.json only of this producer: it stands for the layout."""


def described(raw: Mapping[str, Any], storages: Mapping[str, Storage], drafts: Mapping[str, bool]) -> dict[str, Any]:
    """config.json: that of the source, with what the matrices are stored as now.

    Args:
        storages: by stem, of every matrix of the result's decoder; some are NVFP4.
        drafts: by stem, whether a matrix of a draft is NVFP4.
    """
    config = {field: value for field, value in raw.items() if field not in ("quantization_config", "expert_dtype")}
    if dtype := _expert_dtype(storages):
        config["expert_dtype"] = dtype
    return config | {"quantization_config": _quantization_config(storages, drafts)}


def _expert_dtype(storages: Mapping[str, Storage]) -> str | None:
    """DeepSeek's field; NVFP4 counts as ``fp4``."""
    schemes = {s.decoder.scheme for stem, s in storages.items() if MatrixClass.of(stem) is MatrixClass.EXPERTS}
    schemes = {MXFP4 if scheme == NVFP4 else scheme for scheme in schemes}
    return next((name for name, allowed in EXPERT_DTYPES.items() if schemes == allowed), None)


def _quantization_config(storages: Mapping[str, Storage], drafts: Mapping[str, bool]) -> dict[str, Any]:
    by_class: dict[MatrixClass, dict[str, bool]] = {kind: {} for kind in MatrixClass}
    for stem, storage in storages.items():
        by_class[MatrixClass.of(stem)][stem] = storage is Storage.NVFP4
    if all(storage is Storage.NVFP4 for storage in storages.values()):
        return modelopt_words.full(PRODUCER, _ignored_drafts(drafts))
    schemes = {storage.decoder.scheme for storage in storages.values()}
    return modelopt_words.mixed(
        base=modelopt_words.FP8_BLOCKS if schemes & {FP8, MXFP4} else {"quant_method": "modelopt"},
        nvfp4=_modules({stem: said for kind in by_class.values() for stem, said in kind.items()} | dict(drafts)),
        ignore=[pattern for kind, said in by_class.items() for pattern in _ignored(kind, said)]
        + [*modelopt_words.NOT_QUANTIZED, *_ignored_drafts(drafts)],
        is_moe_nvfp4=all(by_class[MatrixClass.EXPERTS].values()),
        producer=PRODUCER,
    )


def _modules(is_nvfp4: Mapping[str, bool]) -> list[str]:
    """Names of matrices that are NVFP4; routed experts of a layer by one name where all are."""
    owners: dict[str, bool] = {}
    for stem, said in is_nvfp4.items():
        if owner := _experts(stem):
            owners[owner] = owners.get(owner, True) and said
    names = (_experts(s) if owners.get(_experts(s)) else s for s, said in is_nvfp4.items() if said)
    return list(dict.fromkeys(names))


def _experts(stem: str) -> str:
    """``layers.N.ffn.experts`` of one of its matrices; no module for others."""
    return stem.rsplit(".", 2)[0] if ".ffn.experts." in stem else ""


def _ignored(kind: MatrixClass, is_nvfp4: Mapping[str, bool]) -> list[str]:
    """Patterns of the matrices of a class that are not NVFP4."""
    if not any(is_nvfp4.values()):
        return [f"*.{module}" for module in MODULES[kind]] if is_nvfp4 else []
    return [stem for stem, said in is_nvfp4.items() if not said]


def _ignored_drafts(is_nvfp4: Mapping[str, bool]) -> list[str]:
    """Patterns of what is not NVFP4 in drafts; routed experts of a block by one pattern where none is."""
    if not any(is_nvfp4.values()):
        return [modelopt_words.DRAFTS]
    mixed = {_experts(stem) for stem, said in is_nvfp4.items() if said}
    names = (
        f"{_experts(stem)}.*" if _experts(stem) and _experts(stem) not in mixed else stem
        for stem, said in is_nvfp4.items()
        if not said
    )
    return list(dict.fromkeys(names))
