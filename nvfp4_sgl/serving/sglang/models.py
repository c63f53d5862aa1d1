"""SGLang's registry and configuration of models."""

from __future__ import annotations

import os
from typing import Any

from nvfp4_sgl.serving.sglang.ledger import find


def import_registry_lazily(external_package: str) -> Any:
    """SGLang's ``ModelRegistry``, imported so that built-in models load only when one of them is asked for."""
    variable = "SGLANG_EXTERNAL_MODEL_PACKAGE"
    given = os.environ.get(variable)
    os.environ[variable] = given or external_package
    try:
        return find("ModelRegistry")
    finally:
        if given is None:
            del os.environ[variable]


def activation_mode(hf_config: Any) -> str | None:
    """``activation_mode`` of config.json or of ``--json-model-override-args``; ``None`` if neither has one."""
    return getattr(hf_config, "activation_mode", None)
