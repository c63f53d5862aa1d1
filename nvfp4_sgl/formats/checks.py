"""Checks of arguments from their metadata alone: nothing but :func:`holds_any` reads data or waits for the device.

For formats, ops and kernels alike. :class:`OperandTypeError` and :class:`OperandValueError` name the argument, what was
expected and what was found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandTypeError, OperandValueError

ALIGNMENT = 16
"""Bytes: what the widest load or store and the tensor memory accelerator take."""
MAX_EXTENT = 2**31 - 1
"""Rows and features are counted in int32."""
REMEMBERED = 256
"""Arguments that :func:`once` keeps the results of: a few kilobytes each, for one function."""
PLAIN = (type(None), bool, int, float, str)
"""Types of arguments that are compared by their values; and by these types, since 1, 1.0 and True are equal."""
_kept: list[dict[Any, Any]] = []
"""The results of each function of :func:`once`."""
_keeping_nothing = 0
"""Blocks of :func:`keeping_nothing` that are open; results are kept where there are none."""
_forgotten = 0
"""How often :func:`forget` was called: a result that was begun before is not kept."""

Given = ParamSpec("Given")
Result = TypeVar("Result")


def once(check: Callable[Given, Result]) -> Callable[Given, Result]:
    """``check``, whose result is returned again where the arguments look the same to it; what it raises is not kept.

    The layers of a pass call each op with tensors of equal metadata. The calls that check them and that compute a
    launch of them (grid, sizes, compile-time constants) cost more than telling that.

    Args:
        check: holds no tensor in its result, and goes by shapes, strides, dtypes and devices of tensors, by their
            addresses modulo :data:`ALIGNMENT`, and by the values of other arguments, which can be hashed. Tensors may
            lie in tuples, lists and dataclasses. What else it goes by, such as the device's multiprocessors, is an
            argument, too, or :func:`forget` is called where it changes.
    """
    results: dict[tuple[object, ...], Result] = {}
    _kept.append(results)

    @functools.wraps(check)
    def remembered(*arguments: Given.args, **named: Given.kwargs) -> Result:
        values: list[Any] = [*arguments, *named.items()] if named else [*arguments]
        looks: list[object] = [len(arguments)]
        for value in values:  # grows by what its items hold
            kind = type(value)
            if kind in PLAIN:
                looks += (kind, value)
            elif isinstance(value, Tensor):
                looks += (value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % ALIGNMENT)
            elif isinstance(value, (tuple, list)):
                looks += (kind, len(value))
                values += value
            elif hasattr(kind, "__dataclass_fields__"):
                looks.append(kind)
                values += vars(value).values()
            else:
                looks.append(value)
        key = tuple(looks)
        try:
            return results[key]
        except KeyError:
            pass
        begun = _forgotten
        result = check(*arguments, **named)
        if len(results) >= REMEMBERED:
            results.clear()
        if not _keeping_nothing and begun == _forgotten:
            results[key] = result
        return result

    return remembered


def forget() -> None:
    """Forget all results of :func:`once`: what they go by beside their arguments is now another.

    Such as the GPU that Triton compiles for, where one process compiles for several, or constants that a test replaces.
    """
    global _forgotten
    _forgotten += 1
    for results in _kept:
        results.clear()


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """Have all functions of :func:`once` compute anew inside the block, each time.

    For benchmarks and tests that replace what these go by, such as a planner, or count how often it is asked. One
    block may lie in another; results are kept again behind the outer one.
    """
    global _keeping_nothing
    _keeping_nothing += 1
    forget()
    try:
        yield
    finally:
        forget()
        _keeping_nothing -= 1


def require_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raise OperandTypeError if the tensor has none of ``dtypes``."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(one) for one in dtypes)
        raise OperandTypeError(f"{name}: expected dtype {expected}, found {tensor.dtype}")


def require_shape(name: str, tensor: Tensor, expected: Sequence[int], meaning: str = "") -> None:
    """Raise OperandValueError if the shape is another; ``meaning`` spells it for the message, e.g. "[T, K/2]"."""
    if tuple(tensor.shape) != tuple(expected):
        spelt = f" = {meaning}" if meaning else ""
        raise OperandValueError(f"{name}: expected shape {tuple(expected)}{spelt}, found {tuple(tensor.shape)}")


def require_dimensions(name: str, tensor: Tensor, dimensions: int, meaning: str) -> None:
    """Raise OperandValueError if the number of dimensions is another; ``meaning`` as of :func:`require_shape`."""
    if tensor.dim() != dimensions:
        raise OperandValueError(f"{name}: expected shape {meaning}, found {tuple(tensor.shape)}")


def require_table(name: str, tensor: Tensor, width: int | None = None) -> None:
    """Raise OperandValueError if the shape is not [rows, columns], with ``width`` columns if it is given."""
    if tensor.dim() != 2 or (width is not None and tensor.shape[1] != width):
        raise OperandValueError(f"{name}: expected shape [rows, {width or 'K'}], found {tuple(tensor.shape)}")


def require_matrix(name: str, tensor: Tensor, multiple: int = 1) -> None:
    """Raise OperandValueError if the shape is not [..., N, K] with K a multiple of ``multiple``."""
    if tensor.dim() < 2:
        raise OperandValueError(f"{name}: expected shape [..., N, K], found {tuple(tensor.shape)}")
    require_multiple(name, "K", tensor.shape[-1], multiple)


def require_multiple(name: str, quantity: str, value: int, multiple: int, why: str = "") -> None:
    """Raise OperandValueError if ``value`` is no positive multiple; ``why`` gives the reason in the message."""
    if value <= 0 or value % multiple:
        reason = f" ({why})" if why else ""
        raise OperandValueError(
            f"{name}: expected {quantity} to be a positive multiple of {multiple}{reason}, found {value}"
        )


def require_extent(name: str, quantity: str, value: int) -> None:
    """Raise OperandValueError if ``value`` exceeds :data:`MAX_EXTENT`."""
    if value > MAX_EXTENT:
        raise OperandValueError(f"{name}: expected at most {MAX_EXTENT} {quantity}, found {value}")


def require_power_of_two(name: str, quantity: str, value: int) -> None:
    """Raise OperandValueError if ``value`` is no positive power of two."""
    if value <= 0 or value & (value - 1):
        raise OperandValueError(f"{name}: expected {quantity} to be a power of two, found {value}")


def require_range(name: str, value: float, low: float, high: float) -> None:
    """Raise OperandValueError if ``value`` is not in [``low``, ``high``]; NaN never is."""
    if not low <= value <= high:
        raise OperandValueError(f"{name}: expected a value in [{low!r}, {high!r}], found {value!r}")


def require_one_of(name: str, value: int, choices: Sequence[int]) -> None:
    """Raise OperandValueError if ``value`` is not among ``choices``."""
    if value not in choices:
        raise OperandValueError(f"{name}: expected one of {tuple(choices)}, found {value}")


def require_contiguous(name: str, tensor: Tensor) -> None:
    """Raise OperandValueError if the tensor is not contiguous."""
    if not tensor.is_contiguous():
        raise OperandValueError(
            f"{name}: expected a contiguous tensor, found strides {tensor.stride()} for shape {tuple(tensor.shape)}"
        )


def require_rows(name: str, tensor: Tensor, alignment: int = 1) -> None:
    """Raise OperandValueError if the last dimension is not contiguous, or another stride no multiple of ``alignment``.

    alignment: bytes.
    """
    strides, size = tensor.stride(), tensor.element_size()
    if strides[-1] != 1:
        raise OperandValueError(f"{name}: expected the last dimension to be contiguous, found strides {strides}")
    for dimension, stride in enumerate(strides[:-1]):
        if stride * size % alignment:
            raise OperandValueError(
                f"{name}: expected strides of a multiple of {alignment} bytes, found {stride} elements of {size} bytes"
                f" in dimension {dimension} of shape {tuple(tensor.shape)}"
            )


def require_aligned(name: str, tensor: Tensor, alignment: int = ALIGNMENT) -> None:
    """Raise OperandValueError if the address is no multiple of ``alignment`` bytes; only real tensors have one."""
    if tensor.data_ptr() % alignment:
        raise OperandValueError(
            f"{name}: expected an address that is a multiple of {alignment} bytes, found {tensor.data_ptr():#x}; a"
            " slice that starts elsewhere must be copied"
        )


def require_pages(name: str, pages: Tensor, page_bytes: int, page_size: int) -> None:
    """Raise an error if ``pages`` is not a pool, uint8 [pages, bytes], whose pages begin at multiples of 16 bytes.

    page_bytes: least bytes of a page. page_size: entries of a page, for the message.

    Raises:
        OperandTypeError: another dtype.
        OperandValueError: another shape, stride or address.
    """
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
    """Raise OperandValueError if one of ``others`` is on another device than ``tensor``, the argument ``reference``.

    others: by the names of their arguments; ``None`` for an optional one that was not given.
    """
    for name, other in others.items():
        if other is not None and other.device != tensor.device:
            raise OperandValueError(
                f"{name}: expected device {tensor.device}, that of {reference}, found {other.device}"
            )


def holds_any(mask: Tensor) -> bool:
    """Whether any element is true; waits for the device. A meta tensor has no elements, so none is."""
    return not mask.is_meta and bool(mask.any())
