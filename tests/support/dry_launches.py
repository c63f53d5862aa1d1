"""Which kernels a pass launches and what Triton would compile for them, found without running any.

Under Triton's interpreter a launch is recorded in place of being executed, so a whole pass takes milliseconds on a CPU.
Grids and variants are chosen from shapes alone, so nothing depends on the results that are missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor
from triton import language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.runtime.interpreter import InterpretedFunction

from nvfp4_sgl.targets.fused.products_bf16 import Bf16ExpertProjection


class Launch(NamedTuple):
    """A kernel's name, and what it is compiled for: types, values that Triton specialises on, constants, options."""

    name: str
    variant: tuple[Any, ...]


def _is_constant(parameter: inspect.Parameter) -> bool:
    return parameter.annotation is tl.constexpr or "constexpr" in str(parameter.annotation)


def _variant(kernel: InterpretedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    parameters = inspect.signature(kernel.fn).parameters
    exempt = kernel.kwargs.get("do_not_specialize") or []
    options = {name: value for name, value in kwargs.items() if name not in parameters}
    given = {name: value for name, value in kwargs.items() if name in parameters}
    bound = inspect.signature(kernel.fn).bind(*args, **given).arguments
    described = [
        (name, value)
        if _is_constant(parameters[name])
        else (name, native_specialize_impl(BaseBackend, value, False, name not in exempt, True))
        for name, value in bound.items()
    ]
    return (*described, *sorted(options.items()))


@contextmanager
def dry_launches() -> Iterator[list[Launch]]:
    """Launches inside the block, in order, none executed; experts' products give memory as it comes."""
    seen: list[Launch] = []

    def record(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        seen.append(Launch(self.fn.__name__, _variant(self, args, kwargs)))

    def unknown(self: Bf16ExpertProjection, rows: Tensor, ends: Tensor) -> Tensor:
        return rows.new_empty(rows.shape[0], self.weight.shape[1])  # where experts end was not computed

    with (
        mock.patch.object(InterpretedFunction, "run", record),
        mock.patch.object(Bf16ExpertProjection, "forward", unknown),
    ):
        yield seen
