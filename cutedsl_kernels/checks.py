"""Checks of tensors from their metadata alone: cheap enough for each call, and possible on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import OperandTypeError, OperandValueError

TMA_ALIGNMENT = 16
"""Bytes: of the addresses and row strides that the tensor memory accelerator takes."""
MAX_EXTENT = 2**31 - 1
"""Rows and features are counted in int32."""


def require_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise OperandTypeError(f"{name}: expected dtype {expected}, found {tensor.dtype}")


def require_shape(name: str, tensor: Tensor, expected: Sequence[int], meaning: str) -> None:
    """``meaning`` spells the shape, e.g. "[rows, k/2]"."""
    if tuple(tensor.shape) != tuple(expected):
        raise OperandValueError(f"{name}: expected shape {tuple(expected)} = {meaning}, found {tuple(tensor.shape)}")


def require_dimensions(name: str, tensor: Tensor, dimensions: int, meaning: str) -> None:
    if tensor.dim() != dimensions:
        raise OperandValueError(f"{name}: expected shape {meaning}, found {tuple(tensor.shape)}")


def require_multiple(name: str, quantity: str, value: int, multiple: int, why: str) -> None:
    if value <= 0 or value % multiple:
        raise OperandValueError(
            f"{name}: expected {quantity} to be a positive multiple of {multiple} ({why}), found {value}"
        )


def require_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise OperandValueError(
            f"{name}: expected a contiguous tensor, found strides {tensor.stride()} for shape {tuple(tensor.shape)}"
        )


def require_rows(name: str, tensor: Tensor) -> None:
    """The last dimension contiguous, the strides of all others multiples of 16 bytes."""
    strides, size = tensor.stride(), tensor.element_size()
    if strides[-1] != 1:
        raise OperandValueError(f"{name}: expected the last dimension to be contiguous, found strides {strides}")
    for dimension, stride in enumerate(strides[:-1]):
        if stride * size % TMA_ALIGNMENT:
            raise OperandValueError(
                f"{name}: expected strides of a multiple of {TMA_ALIGNMENT} bytes, found {stride} elements of {size}"
                f" bytes in dimension {dimension} of shape {tuple(tensor.shape)}"
            )


def require_extent(name: str, quantity: str, value: int) -> None:
    if value > MAX_EXTENT:
        raise OperandValueError(f"{name}: expected at most {MAX_EXTENT} {quantity}, found {value}")


def require_aligned(name: str, tensor: Tensor) -> None:
    """The address; only real tensors have one."""
    if tensor.data_ptr() % TMA_ALIGNMENT:
        raise OperandValueError(
            f"{name}: expected an address that is a multiple of {TMA_ALIGNMENT} bytes, found {tensor.data_ptr():#x};"
            " a slice that starts elsewhere must be copied"
        )


def require_device(name: str, tensor: Tensor, device: torch.device, reference: str) -> None:
    if tensor.device != device:
        raise OperandValueError(f"{name}: expected device {device}, that of {reference}, found {tensor.device}")
