"""Headers of safetensors files, parsed strictly; no tensor data is touched.

A file is 8 bytes of header length (little endian), that many bytes of JSON, then the data. Every rule a well-formed
file obeys is checked here: a truncated download must be found before anything is served from it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.files import MAX_NAME, fetch_again, foreign_kind, parse_json, require_file, shown

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
MAX_RANK, MAX_SIZE = 8, 2**40
"""Most dimensions of a shape, which are two here, and the largest size or offset: they bound multiplications and
messages."""

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


class Entry(NamedTuple):
    """The place of one tensor in a file. ``dtype`` is safetensors' name; ``offset`` counts from the start of the
    file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def called(name: str, entry: Entry) -> str:
    """A tensor's original name in quotes, and that in its file if it is another."""
    return f"'{name}'" if entry.name.endswith(name) else f"'{name}' (stored as '{entry.name}')"


def read_header(file: Path) -> list[Entry]:
    """Entries of ``file`` in the order of their data; CheckpointError if the file breaks a rule of the format."""
    size = require_file(file, CheckpointError, fetch_again(file, "fetch it again"))
    try:
        with file.open("rb") as stream:
            if kind := foreign_kind(stream.read(256)):
                raise CheckpointError(f"{file}: not a safetensors file: {kind}")
            stream.seek(0)
            prefix = stream.read(LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < LENGTH_BYTES or length > size - LENGTH_BYTES:
                expected = LENGTH_BYTES + (length if len(prefix) == LENGTH_BYTES else 0)
                raise _damaged(file, f"truncated: expected at least {expected} bytes for the header, found {size}")
            if length > MAX_HEADER_BYTES:
                raise _damaged(
                    file,
                    f"not a safetensors file: expected a header of at most {MAX_HEADER_BYTES} bytes, found a length of"
                    f" {length}",
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    header = parse_json(text, f"{file}: safetensors header", CheckpointError, fetch_again(file))
    if not isinstance(header, dict):
        raise _damaged(file, f"safetensors header: expected a JSON object, found {type(header).__name__}")
    header.pop("__metadata__", None)
    start = LENGTH_BYTES + length
    entries = [_entry(file, name, fields, start) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_layout(file, entries, start, size)
    return entries


def _damaged(file: Path, message: str) -> CheckpointError:
    return CheckpointError(f"{file}: {message}; {fetch_again(file)}")


def _entry(file: Path, name: str, fields: object, start: int) -> Entry:
    if len(name) > MAX_NAME:
        raise _damaged(
            file, f"safetensors header: expected names of at most {MAX_NAME} characters, found {shown(name)}"
        )
    try:
        dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]  # type: ignore[index]
        well_formed = isinstance(dtype, str) and isinstance(shape, list) and type(begin) is type(end) is int
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed:
        raise _damaged(
            file, f"tensor '{name}': expected dtype, shape and data_offsets in the header, found {shown(fields)}"
        )
    if dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{file}: tensor '{name}': unknown dtype {shown(dtype)}; expected one of {', '.join(ITEM_BYTES)}"
        )
    if len(shape) > MAX_RANK or any(type(one) is not int or not 0 <= one <= MAX_SIZE for one in shape):
        raise _damaged(
            file,
            f"tensor '{name}': expected a shape of at most {MAX_RANK} non-negative integers, each at most {MAX_SIZE},"
            f" found {shown(shape)}",
        )
    if not 0 <= begin <= end <= MAX_SIZE:
        raise _damaged(
            file,
            f"tensor '{name}': expected data_offsets from 0 to {MAX_SIZE}, the first not beyond the second, found"
            f" [{shown(begin)}, {shown(end)}]",
        )
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != nbytes:
        raise _damaged(
            file,
            f"tensor '{name}': {dtype} {shown(shape)} takes {shown(nbytes)} bytes, but data_offsets [{shown(begin)},"
            f" {shown(end)}] hold {shown(end - begin)}",
        )
    return Entry(name, file, dtype, tuple(shape), start + begin, nbytes)


def _check_layout(file: Path, entries: list[Entry], start: int, size: int) -> None:
    position = start
    for entry in entries:
        if entry.offset != position:
            what = "a hole" if entry.offset > position else "an overlap"
            raise _damaged(
                file, f"tensor '{entry.name}': {what} in the data: expected it at byte {position}, found {entry.offset}"
            )
        position += entry.nbytes
    if size < position:
        raise _damaged(file, f"truncated: expected {position} bytes, found {size}")
    if size > position:
        raise _damaged(file, f"expected {position} bytes, found {size}: data that no tensor accounts for")
