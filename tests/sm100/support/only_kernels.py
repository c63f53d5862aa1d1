"""Refuses whatever torch computes: inside, numbers may come from launched kernels alone."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

OPERATIONS = "nvfp4_sgl::"
"""Custom operations, which launch kernels."""
SHAPES = frozenset(
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty", "permute",
        "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unsqueeze", "view",
    )
)  # fmt: skip
"""What allocates, or looks at the same numbers in another shape."""


class OnlyKernels(TorchDispatchMode):
    """While it is entered, an operation of torch that computes, copies or fills raises ``AssertionError``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        assert name in SHAPES or name.startswith(OPERATIONS), f"torch computes {func}"
        return func(*args, **(kwargs or {}))
