"""Which kernels a pass launches and what Triton would compile for them, found without running any.

A launch is recorded in place of being executed, so a whole pass takes milliseconds on a CPU. Grids and variants are
chosen from shapes alone, so nothing depends on the results that are missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from triton import language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


class Launch(NamedTuple):
    """A kernel's name, and what it is compiled for: types, values that Triton specialises on, constants, options."""

    name: str
    variant: tuple[Any, ...]


def explained(launch: Launch, known: set[Launch]) -> str:
    """How the nearest known variant differs."""
    others = [set(map(str, other.variant)) for other in known if other.name == launch.name]
    variant = set(map(str, launch.variant))
    nearest = min(others, key=lambda other: len(variant ^ other), default=set())
    return f"{launch.name}: {sorted(variant - nearest)}, known {sorted(nearest - variant)}"


def _is_constant(parameter: inspect.Parameter) -> bool:
    return parameter.annotation is tl.constexpr or "constexpr" in str(parameter.annotation)


def _exempt(kernel: InterpretedFunction | JITFunction, option: str) -> Collection[str]:
    """Parameters that this option of ``triton.jit`` names: Triton does not specialise on their values or alignment."""
    if isinstance(kernel, JITFunction):
        return {parameter.name for parameter in kernel.params if getattr(parameter, option)}
    return kernel.kwargs.get(option) or ()


def launch_of(kernel: InterpretedFunction | JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """What a call of a kernel launches; :class:`TypeError` if the arguments are not the kernel's."""
    return Launch(kernel.fn.__name__, _variant(kernel, args, kwargs))


def _variant(
    kernel: InterpretedFunction | JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    parameters = inspect.signature(kernel.fn).parameters
    exempt, unaligned = _exempt(kernel, "do_not_specialize"), _exempt(kernel, "do_not_specialize_on_alignment")
    options = {name: value for name, value in kwargs.items() if name not in parameters}
    given = {name: value for name, value in kwargs.items() if name in parameters}
    bound = inspect.signature(kernel.fn).bind(*args, **given).arguments
    described = [
        (name, value)
        if _is_constant(parameters[name])
        else (name, native_specialize_impl(BaseBackend, value, False, name not in exempt, name not in unaligned))
        for name, value in bound.items()
    ]
    return (*described, *sorted(options.items()))


@contextmanager
def dry_launches() -> Iterator[list[Launch]]:
    """Interpreted launches inside the block, in order, none executed."""
    seen: list[Launch] = []

    def record(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        seen.append(launch_of(self, args, kwargs))

    with mock.patch.object(InterpretedFunction, "run", record):
        yield seen
