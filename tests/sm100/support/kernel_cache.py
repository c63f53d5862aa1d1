"""Compiled kernels on disk, for all processes and checkouts: by the hash of what they are made from.

An entry is a library of one kernel (``nvfp4_sgl.cutedsl_kernels.library``) and its PTX. It is made in a folder of its
own and moved into place, so that processes need no lock.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nvfp4_sgl.cutedsl_kernels import library
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.errors import LibraryError
from tests.sm100.emulator import Compiled
from tests.sm100.emulator.host import runtime_library

PTX = "kernel.ptx"
FORMAT = 2
"""Version of the format of entries."""
LOADED = library.fingerprint()
"""Fingerprint of the sources that this process runs; those on disk may be edited while it does."""
KEPT_DAYS = 7
"""An entry that nothing has used for longer goes when the next one is made."""


def cache_folder() -> Path:
    """Where the entries are: a folder of this process alone once the sources on disk are not those that it runs."""
    if library.fingerprint() != LOADED:
        return Path(_own_folder().name)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nvfp4-sgl" / "compiled"


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kernels-")


def entry_of(key: KernelKey) -> Path:
    """The folder of a kernel."""
    made_from = json.dumps([FORMAT, library.fingerprint(), repr(key)], sort_keys=True)
    return cache_folder() / hashlib.sha256(made_from.encode()).hexdigest()[:32]


def cached(key: KernelKey, compile_key: Callable[[KernelKey], Compiled]) -> Compiled:
    """The kernel of a key, behind its C interface.

    Args:
        compile_key: makes what is not there; its ``function`` is what ``cute.compile`` returned.
    """
    entry = entry_of(key)
    if not entry.exists():
        _store(key, compile_key(key), entry)
    os.utime(entry)
    try:
        native = library.Library(entry, runtime=runtime_library(), device=0).kernel(key)
    except LibraryError:
        # The sources were edited between naming the entry and making it.
        shutil.rmtree(entry)
        return cached(key, compile_key)
    return Compiled(native, (entry / PTX).read_text())


def _store(key: KernelKey, compiled: Compiled, entry: Path) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    _prune(entry.parent)
    making = Path(tempfile.mkdtemp(prefix="making-", dir=entry.parent))
    try:
        with tempfile.TemporaryDirectory() as objects:
            entry_point = library.export(key, Path(objects), compiled.function)
            library.link({key: entry_point}, Path(objects), making)
        (making / PTX).write_text(compiled.ptx)
        making.rename(entry)
    except OSError:
        # Another process was faster.
        if not entry.exists():
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _prune(folder: Path) -> None:
    oldest = time.time() - KEPT_DAYS * 24 * 3600
    for entry in folder.iterdir():
        try:
            if entry.stat().st_mtime < oldest:
                shutil.rmtree(entry, ignore_errors=True)
        except FileNotFoundError:
            continue
