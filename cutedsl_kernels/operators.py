"""PyTorch custom operators from tables, ``torch.ops.nvfp4_sgl``: plain tensors in, results into given tensors.

A room (``w4a4``, ``mxfp8``, ``w4a16``, ``w8a16``) says what its operators take and, for each, a check and a call.
Every call is checked from the tensors' metadata before anything is launched. The same checks run on fake tensors, so
that ``torch.compile`` reports a mistake while tracing. What follows from the looks of operands (checks, the plan, the
kernel's key, sizes and strides) is kept, and found again by their looks. Nothing is allocated, copied or synchronised,
so calls may be captured in CUDA graphs (each kernel must have run once before: see :mod:`.warm_up`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import (
    ALIGNMENT,
    once,
    require_aligned,
    require_contiguous,
    require_dtype,
    require_multiple,
    require_rows,
    require_same_device,
    require_shape,
)
from nvfp4_sgl.limits import MAX_GEMM_EXPERTS

from . import launcher
from .common.call import BoundCall
from .common.shape import Output
from .compiled import KernelKey
from .launcher import Target
from .plan import Pin
from .sm90.call import Call as HopperCall
from .sm100.call import Call

OUTPUTS: dict[torch.dtype, Output] = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Kernel outputs by the dtype of ``out``."""
WHOLE_STORES_REASON = "stores write whole 16 bytes, beyond a row's end too"
"""Why features must be a multiple, for messages. Seen on an H200: a TMA store ends not at the tensor's last element,
but at the next multiple of 16 bytes."""
ARGUMENT = re.compile(r"(\w+)[,)]")
"""Names of arguments in a schema."""

_LIBRARY = torch.library.Library("nvfp4_sgl", "FRAGMENT")


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Arguments that operators of every room have; a room adds its own. Fields have the names of schemas.

    Attributes:
        tokens: activations [rows, ...] or [rows, groups, ...].
        weights: in the layout of the architecture.
        out: the result.
        limit: the SwiGLU clamp of a gated GEMM, else None.
    """

    tokens: Tensor
    weights: Tensor
    out: Tensor
    limit: float | None = None


OperandsT = TypeVar("OperandsT", bound=Operands)


@dataclass(frozen=True)
class Operator(Generic[OperandsT]):
    """One operator of a room's table.

    Attributes:
        schema: name and arguments, as ``torch.library`` reads them; nothing is returned.
        check: takes the operator's name and its operands, which are on one device, and refuses those that no kernel
            takes; returns what is written.
        call: plans the kernel for operands that have been checked, and says what it is launched with.
    """

    schema: str
    check: Callable[[str, OperandsT], Output]
    call: Callable[[OperandsT, Output, Target], Call | HopperCall]

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


@dataclass(frozen=True)
class Room(Generic[OperandsT]):
    """The shared properties of the operators for one kind of activations.

    Attributes:
        operands: the class of their arguments.
        architectures: those that have kernels for them.
        activations: what they multiply, for the error on another architecture.
    """

    operands: type[OperandsT]
    architectures: tuple[str, ...]
    activations: str

    def register(self, *table: Operator[OperandsT]) -> None:
        """Register operators for every device, so that a wrong device gets our error; fake tensors are only checked."""
        for operator in table:
            self._register(operator)

    def _register(self, operator: Operator[OperandsT]) -> None:
        name, fields = operator.name, ARGUMENT.findall(operator.schema)
        labels = [f"{name}: {field}" for field in fields]

        def check(operands: OperandsT) -> Output:
            values = [getattr(operands, field) for field in fields]
            require_same_device("out", operands.out, **dict(_tensors(labels, values)))
            return operator.check(name, operands)

        def made(arguments: tuple[object, ...]) -> OperandsT:
            return self.operands(**dict(zip(fields, arguments, strict=True)))

        def trace(*arguments: object) -> None:
            check(made(arguments))

        @once
        def bind(installed: int, pin: Pin | None, programmatic_launch: bool, *arguments: object) -> Launch | None:
            operands = made(arguments)
            output = check(operands)
            target = launcher.target(operands.out.device, self.architectures, self.activations)
            return bound(name, target, operator.call(operands, output, target), operands)

        def run(*arguments: object) -> None:
            runner = launcher.current()
            launch = bind(launcher.installed, runner.pin, runner.programmatic_launch, *arguments)
            if launch is not None:
                runner.launch(launch.key, launch.call.of(dict(zip(fields, arguments, strict=True))), launch.clusters)

        _LIBRARY.define(f"{operator.schema} -> ()", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"nvfp4_sgl::{name}", trace, lib=_LIBRARY)


def _tensors(labels: Iterable[str], values: Iterable[object]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among ``values``, and those of lists, by their labels."""
    for label, value in zip(labels, values, strict=True):
        if isinstance(value, Tensor):
            yield label, value
        elif isinstance(value, list):
            yield from _tensors((f"{label}[{i}]" for i in range(len(value))), value)


class Launch(NamedTuple):
    """The launch of operands that look the same."""

    key: KernelKey
    call: BoundCall
    clusters: int


def bound(op: str, target: Target, call: Call | HopperCall, operands: Operands) -> Launch | None:
    """Check addresses, which only real tensors have, and bind the call; None if it has no rows."""
    for name, tensor in call.copied().items():
        require_aligned(f"{op}: {name}", tensor)
    if call.rows == 0:
        return None
    call = call.with_workspace(target.clusters)
    clusters, programmatic_launch = call.clusters(target.clusters), launcher.current().programmatic_launch
    weighted = call.row_weight is not None
    key = KernelKey(target.architecture, call.shape, operands.limit, weighted, programmatic_launch)
    return Launch(key, BoundCall(call, clusters, vars(operands)), clusters)


def check_alpha(op: str, alpha: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Check global scales, fp32 of ``shape``."""
    require_dtype(f"{op}: alpha", alpha, torch.float32)
    require_shape(f"{op}: alpha", alpha, shape, meaning)
    require_contiguous(f"{op}: alpha", alpha)


def check_experts(op: str, offsets: Tensor, counts: Tensor, experts: int) -> None:
    """Check the number of experts, and their offsets and counts, int32 [experts]."""
    if not 1 <= experts <= MAX_GEMM_EXPERTS:
        raise OperandValueError(f"{op}: weights: expected 1 to {MAX_GEMM_EXPERTS} experts, found {experts}")
    for name, tensor in (("offsets", offsets), ("counts", counts)):
        require_dtype(f"{op}: {name}", tensor, torch.int32)
        require_shape(f"{op}: {name}", tensor, (experts,), "[experts]")
        require_contiguous(f"{op}: {name}", tensor)


def check_out(op: str, out: Tensor, shape: tuple[int, ...], meaning: str) -> Output:
    """Check a bf16 or fp32 result of ``shape``; returns which it is."""
    require_dtype(f"{op}: out", out, *OUTPUTS)
    require_shape(f"{op}: out", out, shape, meaning)
    require_rows(f"{op}: out", out, ALIGNMENT)
    whole = ALIGNMENT // out.element_size()
    require_multiple(f"{op}: out", "features", shape[-1], whole, WHOLE_STORES_REASON)
    return OUTPUTS[out.dtype]
