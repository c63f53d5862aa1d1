"""Checks of arguments from their metadata alone: nothing here reads a tensor's data or waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes: what the widest load or store takes."""


class KernelError(Exception):
    """Base of every deliberate error of this folder; each names the argument, what was expected and what was found."""


class OperandTypeError(KernelError, TypeError):
    """An argument has the wrong dtype, or is absent where it is needed (or the reverse)."""


class OperandValueError(KernelError, ValueError):
    """An argument has a shape, stride, alignment, device or value that no kernel takes."""


def require_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise OperandTypeError(f"{name}: expected dtype {expected}, found {tensor.dtype}")


def require_shape(name: str, tensor: Tensor, expected: Sequence[int], meaning: str) -> None:
    """``meaning`` spells the shape, e.g. "[T, K/2]"."""
    if tuple(tensor.shape) != tuple(expected):
        raise OperandValueError(f"{name}: expected shape {tuple(expected)} = {meaning}, found {tuple(tensor.shape)}")


def require_dimensions(name: str, tensor: Tensor, dimensions: int, meaning: str) -> None:
    if tensor.dim() != dimensions:
        raise OperandValueError(f"{name}: expected shape {meaning}, found {tuple(tensor.shape)}")


def require_multiple(name: str, quantity: str, value: int, multiple: int) -> None:
    if value <= 0 or value % multiple:
        raise OperandValueError(f"{name}: expected {quantity} to be a positive multiple of {multiple}, found {value}")


def require_power_of_two(name: str, quantity: str, value: int) -> None:
    if value <= 0 or value & (value - 1):
        raise OperandValueError(f"{name}: expected {quantity} to be a power of two, found {value}")


def require_range(name: str, value: float, low: float, high: float) -> None:
    """NaN is outside every range."""
    if not low <= value <= high:
        raise OperandValueError(f"{name}: expected a value in [{low!r}, {high!r}], found {value!r}")


def require_one_of(name: str, value: int, choices: Sequence[int]) -> None:
    if value not in choices:
        raise OperandValueError(f"{name}: expected one of {tuple(choices)}, found {value}")


def require_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise OperandValueError(
            f"{name}: expected a contiguous tensor, found strides {tensor.stride()} for shape {tuple(tensor.shape)}"
        )


def require_rows(name: str, tensor: Tensor) -> None:
    """The last dimension contiguous; the others may have any stride."""
    if tensor.stride(-1) != 1:
        raise OperandValueError(
            f"{name}: expected the last dimension to be contiguous, found strides {tensor.stride()}"
        )


def require_strides(name: str, tensor: Tensor, alignment: int) -> None:
    """The address and every stride but the last a multiple of ``alignment`` bytes."""
    steps = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1])]
    if any(step % alignment for step in steps):
        raise OperandValueError(
            f"{name}: expected an address and strides that are multiples of {alignment} bytes, found"
            f" {tensor.data_ptr():#x} and strides {tensor.stride()}"
        )


def require_aligned(name: str, tensor: Tensor) -> None:
    if tensor.data_ptr() % ALIGNMENT:
        raise OperandValueError(
            f"{name}: expected an address that is a multiple of {ALIGNMENT} bytes, found {tensor.data_ptr():#x}"
        )


def require_pages(name: str, pages: Tensor, page_bytes: int, page_size: int) -> None:
    """A paged pool, uint8 [pages, at least ``page_bytes``], whose pages begin at multiples of 16 bytes."""
    require_dimensions(name, pages, 2, "[pages, bytes of a page]")
    require_dtype(name, pages, torch.uint8)
    require_rows(name, pages)
    if page_size <= 0 or pages.shape[1] < page_bytes or pages.stride(0) % ALIGNMENT:
        raise OperandValueError(
            f"{name}: expected pages of {page_size} entries, {page_bytes} bytes or more, a multiple of {ALIGNMENT}"
            f" apart, found shape {tuple(pages.shape)}, strides {pages.stride()}"
        )
    require_aligned(name, pages)


def require_same_device(reference: str, tensor: Tensor, **others: Tensor | None) -> None:
    """``None`` stands for an optional argument that was not given."""
    for name, other in others.items():
        if other is not None and other.device != tensor.device:
            raise OperandValueError(
                f"{name}: expected device {tensor.device}, that of {reference}, found {other.device}"
            )
