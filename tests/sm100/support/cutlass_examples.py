"""NVIDIA's CuTeDSL example kernels for SM100, as FlashInfer installs them."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType


@functools.cache
def example(name: str) -> ModuleType:
    """The module of one example, ``fmha`` or ``dense_gemm_persistent`` for instance."""
    import flashinfer

    folder = Path(flashinfer.__file__).parent / "data/cutlass/examples/python/CuTeDSL/blackwell"
    spec = importlib.util.spec_from_file_location(f"cutlass_example_{name}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
