"""NVIDIA's CuTeDSL example kernels for SM100 and Hopper, as FlashInfer installs them."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch


@functools.cache
def example(name: str, family: str = "blackwell") -> ModuleType:
    """The module of one example, ``fmha`` or ``dense_gemm_persistent`` for instance; ``family`` is its folder."""
    import flashinfer

    folder = Path(flashinfer.__file__).parent / "data/cutlass/examples/python/CuTeDSL"
    spec = importlib.util.spec_from_file_location(f"cutlass_example_{family}_{name}", folder / family / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.object(sys, "path", [str(folder), *sys.path]):  # some import helpers from there
        spec.loader.exec_module(module)
    return module
