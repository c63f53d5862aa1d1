"""The directory that a conversion writes, and what is kept in it until the conversion is done.

Everything is written to a temporary name, brought to the disk and renamed, so that a process that is killed at any
moment leaves whole files alone. :data:`UNFINISHED` is a folder inside that holds what was asked for, a record of each
file that is done, and temporary files; config.json is the last file that appears.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from nvfp4_sgl.checkpoint.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES
from nvfp4_sgl.convert.options import as_flag
from nvfp4_sgl.errors import CheckpointError, ConfigError
from nvfp4_sgl.files import MANIFEST, MAX_CONFIG_BYTES, MAX_INDEX_BYTES, UNFINISHED, read_json, require_directory

JOB = "job.json"
MANIFEST_FIELD = "conversion"
"""Where a finished conversion's manifest keeps what :data:`JOB` held."""
SAMPLES, SAMPLE_BYTES = 16, 1 << 16
"""Places of each source file that its fingerprint looks at."""


class Folder:
    """A conversion's directory, held by one process.

    Attributes:
        directory: where files appear when they are whole.
        job: what was asked for: :func:`describe`.
    """

    def __init__(self, directory: Path, job: Mapping[str, Any], lock: BinaryIO):
        self.directory, self.job, self._lock = directory, job, lock
        self._work = directory / UNFINISHED

    @classmethod
    def begin(cls, directory: Path, job: Mapping[str, Any], *, finished: bool = False) -> Folder:
        """Start a conversion in a new or empty directory, resume one, or open a ``finished`` one again.

        Raises:
            CheckpointError: the directory holds other files, a conversion of another source or with other options, or
                another process is at work in it.
        """
        work = directory / UNFINISHED
        try:
            if not directory.exists():
                directory.mkdir(parents=True)
            require_directory(directory, CheckpointError)
            if not work.exists():
                if not finished:
                    _require_empty(directory)
                work.mkdir()
            lock = (work / "lock").open("wb")
        except OSError as error:
            raise cannot_write(Path(error.filename or directory), error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise CheckpointError(
                f"{directory}: another process is converting into it; wait for it, or end it"
            ) from None
        folder = cls(directory, job, lock)
        try:
            folder._agree()
        except BaseException:
            lock.close()
            raise
        return folder

    def _agree(self) -> None:
        """Record the options of the conversion, or compare them with the recorded ones."""
        file = self._work / JOB
        if not file.exists():
            if self.records():
                raise CheckpointError(f"{file}: not found beside records of a conversion; remove {self.directory}")
            self.write_json(file, self.job)
            return
        # The source may have moved: what is recorded stays, so that the result is the same.
        self.job = _require_same(self.directory, file, self.job)
        for stale in self._work.glob("*.tmp"):
            stale.unlink()

    def records(self) -> dict[str, Any]:
        """The record of each complete file, by its name."""
        found = {}
        for file in sorted(self._work.glob("*.safetensors.json")):
            name = file.name.removesuffix(".json")
            if (self.directory / name).is_file():
                found[name] = read_json(file, CheckpointError, MAX_INDEX_BYTES, "remove it")
        return found

    def record(self, name: str, value: object) -> None:
        """Record ``value`` for the complete file ``name``."""
        self.write_json(self._work / f"{name}.json", value)

    def write_json(self, file: Path, value: object) -> None:
        """Write a JSON file."""
        with self.file(file) as stream:
            stream.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())

    def copy(self, source: Path, name: Path) -> None:
        """Copy a small file to ``name`` in the directory."""
        target = self.directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as stream, self.file(target) as copy:
            shutil.copyfileobj(stream, copy)

    @contextmanager
    def file(self, target: Path) -> Iterator[BinaryIO]:
        """A stream to a file that becomes ``target`` once the context ends without an exception.

        Raises:
            CheckpointError: it cannot be written; a full disk is the usual reason.
        """
        temporary = self._work / f"{target.name}.tmp"
        try:
            with temporary.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(target)
            _sync(target.parent)
        except BaseException as error:
            temporary.unlink(missing_ok=True)  # its room is what others may lack
            if isinstance(error, OSError):
                raise cannot_write(target, error) from error
            raise

    def finish(self) -> None:
        """Remove what only an unfinished conversion needs; leftovers beside config.json do no harm."""
        shutil.rmtree(self._work, ignore_errors=True)
        self._lock.close()

    def close(self) -> None:
        """Release the lock of the directory; a later run resumes here."""
        self._lock.close()


def cannot_write(file: Path, error: OSError) -> CheckpointError:
    """The error for a full disk, or for a directory that is not ours to write."""
    return CheckpointError(
        f"{file}: cannot be written ({os.strerror(error.errno or 0)}); make room, or see to the rights, and run the"
        " same command again: files that are whole are kept"
    )


def is_finished(directory: Path, job: Mapping[str, Any]) -> bool:
    """Whether ``directory`` holds what the conversion ``job`` wrote; looks, and writes nothing.

    Raises:
        CheckpointError: it holds another conversion, finished or begun: the message has each option that differs, with
            the value that the directory was made with and the one given.
    """
    if (begun := directory / UNFINISHED / JOB).exists():
        _require_same(directory, begun, job)
    if not (directory / "config.json").exists() or not (directory / MANIFEST).exists():
        return False
    manifest = read_json(directory / MANIFEST, CheckpointError, MAX_INDEX_BYTES, "name another directory")
    earlier = manifest.get(MANIFEST_FIELD) if isinstance(manifest, dict) else None
    if differing := differences(earlier, job):
        raise CheckpointError(
            f"{directory}: holds a finished conversion of another kind: {differing}; name another directory for this"
            " one, or remove that"
        )
    return True


def _require_same(directory: Path, file: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """The record in ``file`` of the conversion in ``directory``, which must be ``job``."""
    earlier: dict[str, Any] = read_json(file, CheckpointError, MAX_CONFIG_BYTES, "remove the directory")
    if differing := differences(earlier, job):
        raise CheckpointError(
            f"{directory}: holds an unfinished conversion of another kind: {differing}; go on with the earlier source"
            " and options, or remove the directory"
        )
    return earlier


def describe(source: Path, options: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Describe the options; two descriptions of one conversion have no :func:`differences`."""
    return {"source": str(source.resolve()), "fingerprint": _fingerprint(source), "version": version, **options}


def differences(earlier: object, now: Mapping[str, Any]) -> str:
    """Flags that differ between two descriptions, apart from the place of the source; empty if none does."""
    if not isinstance(earlier, dict):
        return "its record is damaged"
    told = []
    for field in sorted((earlier.keys() | now.keys()) - {"source"}):
        if earlier.get(field) == now.get(field):
            continue
        if field == "fingerprint":
            told.append(f"made from {earlier.get('source')} as it was then, given {now['source']}")
        elif field == "version":
            told.append(f"made by version {earlier.get(field)} of nvfp4-sgl, this is {now.get(field)}")
        else:
            flag, made_with = as_flag(field, earlier.get(field))
            told.append(f"made with {flag} {made_with}, given {as_flag(field, now.get(field))[1]}")
    return "; ".join(told)


def _fingerprint(source: Path) -> str:
    """Hash of config.json, and of names, sizes, headers and samples of the safetensors files."""
    digest = hashlib.sha256((source / "config.json").read_bytes())
    for file in sorted(source.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            digest.update(stream.read(LENGTH_BYTES + min(length, MAX_HEADER_BYTES)))
            for sample in range(SAMPLES):
                stream.seek(max(size - SAMPLE_BYTES, 0) * sample // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def require_apart(source: Path, target: Path) -> None:
    """:class:`ConfigError` if one directory is the other, or holds it."""
    one, other = source.resolve(), target.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise ConfigError(f"{target}: expected a directory apart from the source {source}; name another")


def require_usable(directory: Path, job: Mapping[str, Any]) -> None:
    """Refuse what :meth:`Folder.begin` would refuse of ``directory``; looks, and writes nothing.

    Raises:
        CheckpointError: it holds other files, or another conversion.
    """
    if not directory.exists():
        return
    require_directory(directory, CheckpointError)
    if not is_finished(directory, job) and not (directory / UNFINISHED).exists():
        _require_empty(directory)


def _require_empty(directory: Path) -> None:
    if any(directory.iterdir()):
        raise CheckpointError(
            f"{directory}: not empty, and no unfinished conversion; name a new directory, or an empty one"
        )


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
