"""Checks of files of unknown origin before they are read; errors name what the files are."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from nvfp4_sgl.errors import CheckpointError, ConfigError

MAX_CONFIG_BYTES = 16 * 2**20
MAX_INDEX_BYTES = 256 * 2**20
"""An index of 290,000 tensors, the largest released, takes 27 MB."""
UNFINISHED = ".nvfp4_sgl_convert"
"""Folder in a directory that ``nvfp4-sgl convert`` writes, until it is done; config.json comes last."""
MANIFEST = "nvfp4_sgl_manifest.json"
"""What a finished conversion has beside its weights: where it comes from, and a checksum of each tensor."""
SHOWN_CHARACTERS = 120
"""Characters of a value that an error quotes."""
SHOWN_SNAPSHOTS = 4
"""Folders of a hub's cache that an error lists."""
MAX_NAME = 256
"""Characters of a tensor's or a file's name; released ones have fewer than 80."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FOREIGN = (
    (re.compile(rb"version https://git-lfs"), "a git-lfs pointer, not the file itself", "run 'git lfs pull'"),
    (re.compile(rb"\s*<(!doctype|html|\?xml)", re.I), "a web page", "the download went wrong: fetch the file again"),
    (re.compile(rb"\x80[\x02-\x05]|PK\x03\x04"), "a pickle (a PyTorch file)", "only safetensors files are read"),
    (re.compile(rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd"), "a compressed file", "unpack it"),
    (re.compile(rb"GGUF"), "a GGUF file", "only safetensors files are read"),
)


def escaped(text: str) -> str:
    """``text`` with control characters, but newlines and tabs, spelt out: names come from files."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: object) -> str:
    """``repr`` of what a file holds, cut where it gets long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python prints no integer of thousands of digits, nor what is nested deeply
        return f"a value of type {type(value).__name__} that is too long to print"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text)} characters)"


def foreign_kind(head: bytes) -> str | None:
    """Kind of a foreign file that begins with ``head``, and the remedy; for kinds that are often found by mistake."""
    for pattern, what, remedy in _FOREIGN:
        if pattern.match(head):
            return f"this is {what}; {remedy}"
    return None


def require_directory(path: str | Path, error: type[ConfigError] | type[CheckpointError]) -> Path:
    """``path``, which must be a readable directory; ``error`` says what it is instead."""
    path = Path(path)
    kind = _kind(path)
    if kind == "directory":
        refuse_hub_cache(path, error)
        return path
    if kind == "regular file":
        raise error(f"{path}: expected a directory, found a file; name the directory that holds it, {path.parent}")
    if kind == "nothing" and _HUB_ID.fullmatch(str(path)):
        raise error(
            f"{path}: expected a directory, found nothing of that name. If it is a model of the Hugging Face hub,"
            f" fetch it first: hf download {path} --local-dir DIR"
        )
    raise error(f"{path}: expected a directory that holds config.json and safetensors files, found {kind}")


def refuse_hub_cache(directory: Path, error: type[ConfigError] | type[CheckpointError]) -> None:
    """Refuse folders of the Hugging Face cache that hold checkpoints further down, and name those."""
    # Resolved: "." and links have names of their own.
    found = Path(os.path.realpath(directory))  # Path.resolve raises where links go in a circle
    root = found.parent if found.name in ("snapshots", "blobs", "refs") else found
    if (directory / "config.json").exists():
        return
    if not (root / "snapshots").is_dir():
        _refuse_hub_root(directory, error)
        return
    if not (root.name.startswith("models--") or (root / "refs").is_dir()):
        return
    main = root / "refs" / "main"
    newest = main.read_text(errors="replace").strip() if main.is_file() else ""
    # The revision that a branch names comes first: it is the one that was fetched last.
    folders = sorted(
        (folder for folder in (root / "snapshots").iterdir() if folder.is_dir()),
        key=lambda folder: (folder.name != newest, folder.name),
    )
    expected = f"{directory}: expected a checkpoint, found a model's folder in the Hugging Face cache"
    if not folders:
        raise error(f"{expected} without a snapshot; fetch the model again: hf download")
    shown_folders = [str(folder) for folder in folders[:SHOWN_SNAPSHOTS]]
    more = f" and {len(folders) - SHOWN_SNAPSHOTS} more" if len(folders) > SHOWN_SNAPSHOTS else ""
    raise error(f"{expected}; pass its snapshot {' or '.join(shown_folders)}{more}")


def _refuse_hub_root(directory: Path, error: type[ConfigError] | type[CheckpointError]) -> None:
    """Refuse the cache itself, or the folder around it, ``HF_HOME``."""
    for pattern in ("models--*/snapshots/*", "hub/models--*/snapshots/*"):
        if folders := sorted(folder for folder in directory.glob(pattern) if folder.is_dir()):
            raise error(
                f"{directory}: expected a checkpoint, found the Hugging Face cache; pass one of {directory / pattern},"
                f" such as {folders[0]}"
            )


def refuse_lost(directory: Path, error: OSError) -> None:
    """Raise :class:`CheckpointError` for ``error`` if it comes of files that ``directory`` had when it was checked."""
    name = error.filename
    is_within = isinstance(name, str) and Path(name).parent == directory and not Path(name).exists()
    if is_within or not (directory / "config.json").is_file():
        lost = name if is_within else directory
        raise CheckpointError(
            f"{lost}: was there when the server started; start it again once it is complete"
        ) from error


def require_finished(directory: Path, error: type[ConfigError] | type[CheckpointError]) -> None:
    """Refuse a directory that ``nvfp4-sgl convert`` has begun and not finished."""
    if not (directory / "config.json").exists() and (directory / UNFINISHED).is_dir():
        raise error(
            f"{directory}: an unfinished conversion, not a checkpoint; run the same 'nvfp4-sgl convert' command again:"
            " it goes on where it was"
        )


def fetch_again(file: Path, otherwise: str = "fetch the file again") -> str:
    """Remedy for a damaged file of weights: ``otherwise``, unless a conversion wrote it."""
    if (file.parent / MANIFEST).exists():
        return "run the same 'nvfp4-sgl convert' command again: it writes damaged files anew"
    return otherwise


def became_shorter(file: Path) -> CheckpointError:
    """The error for a file that ends before what its header says, though it was whole when it was opened."""
    return CheckpointError(
        f"{file}: became shorter while it was read; let nothing write to it, and {fetch_again(file)}"
    )


def require_file(path: Path, error: type[ConfigError] | type[CheckpointError], remedy: str) -> int:
    """Size of ``path``, which must be a regular file: a pipe would wait for ever, a loop of links leads nowhere."""
    kind = _kind(path)
    if kind == "nothing":
        raise error(f"{path}: not found; {remedy}")
    if kind != "regular file":
        raise error(f"{path}: expected a file, found {kind}; {remedy}")
    return path.stat().st_size


def _kind(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a link that leads nowhere" if path.is_symlink() else "nothing"
    except OSError as problem:
        return f"what cannot be read ({os.strerror(problem.errno or 0)})"
    except ValueError:  # a null character in the name
        return "a name that no file can have"
    known = ((stat.S_ISREG, "regular file"), (stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "a named pipe"))
    return next((name for check, name in known if check(mode)), "neither a file nor a directory")


def read_json(path: Path, error: type[ConfigError] | type[CheckpointError], limit: int, remedy: str) -> Any:
    """The value in ``path``, at most ``limit`` bytes of JSON; ``remedy`` is what to do if there is no such file."""
    size = require_file(path, error, remedy)
    if size > limit:
        raise error(f"{path}: expected at most {limit} bytes, found {size}; this is not the file that it should be")
    try:
        raw = path.read_bytes()
    except OSError as problem:
        raise error(f"{path}: cannot be read ({os.strerror(problem.errno or 0)})") from problem
    return parse_json(raw, str(path), error, fetch_again(path, "fetch it again, or correct it"))


def parse_json(raw: bytes, where: str, error: type[ConfigError] | type[CheckpointError], remedy: str) -> Any:
    """The value of a JSON text; ``error`` names ``where`` it came from, and the ``remedy`` if it is damaged."""
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise error(f"{where}: not valid JSON (nested too deeply); {remedy}") from None
    except ValueError as problem:  # JSONDecodeError and UnicodeDecodeError, too; numbers of thousands of digits
        if kind := foreign_kind(raw[:256]):
            raise error(f"{where}: not valid JSON: {kind}") from None
        raise error(f"{where}: not valid JSON ({str(problem)[:SHOWN_CHARACTERS]}); {remedy}") from problem


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose fields are there once: readers do not agree on which of two counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"a field is there twice: {shown(name)}")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")
