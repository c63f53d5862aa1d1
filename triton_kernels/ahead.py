"""Compile Triton kernels before their first launch: in other processes, or on a machine without the GPU.

:func:`recording` notes what launches would compile and does nothing else. A :class:`Variant` so noted can be compiled
in any process with the same build of Triton and the same sources, by :meth:`Variant.compile`; the result is in Triton's
cache on disk, where the launch then finds it. :func:`targeting` stands in for the GPU where there is none.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, _triton_jit_function_registry

from nvfp4_sgl.formats import checks

from .common import chip
from .common.rounding import INTERPRETED

PACKAGE = __name__.rpartition(".")[0] + "."
"""Modules of this package begin with it."""
WARP = 32
GROUP = "__grp__"
"""Beginning of the name of a file in which Triton lists a kernel's other files."""


@dataclass(frozen=True)
class Variant:
    """A kernel and what it is specialised for.

    Attributes:
        module: of the kernel. name: of its function.
        specialization: Triton's description in JSON: types, alignments, constants, options, target. Arguments that are
            named tuples have lost their names in it.
        source: the same but for the options, pickled: signature, constants and alignments.
    """

    module: str
    name: str
    specialization: str
    source: bytes = field(compare=False, repr=False)

    @property
    def kernel(self) -> JITFunction[Any]:
        """The function that Triton compiles."""
        found = getattr(importlib.import_module(self.module), self.name)
        assert isinstance(found, JITFunction), (self.module, self.name)
        return found

    def compile(self) -> None:
        """Compile it for the active driver's target and write it to Triton's cache; then note that it is there."""
        signature, constants, alignments = pickle.loads(self.source)
        options = json.loads(self.specialization)["options"]
        compiled = triton.compile(
            ASTSource(self.kernel, signature, constants, alignments),
            target=driver.active.get_current_target(),
            options={name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
        )
        self._note.parent.mkdir(parents=True, exist_ok=True)
        _put(self._note, compiled.hash.encode())

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has run with these sources and this build of Triton, and its files are all there.

        Triton reads none of a kernel's files if one is missing: the launch would compile it, alone, in its process.
        """
        return bool(self.files())

    def files(self) -> list[Path]:
        """Its files in Triton's cache, the note last; none unless it :attr:`is_compiled`."""
        if not self._note.exists():
            return []
        manager = get_cache_manager(self._note.read_text())
        group = manager.get_group(f"{self.name}.json")
        if group is None:
            return []
        listed = manager.get_file(f"{GROUP}{self.name}.json")
        assert listed is not None, "Triton found the group by it"
        return [Path(listed), *map(Path, group.values()), self._note]

    @property
    def _note(self) -> Path:
        """A file beside Triton's own, which are named by what only a compilation can tell."""
        # Its version does not say enough: Triton finds nothing of a build for another Python.
        parts = (triton_key(), self.kernel.cache_key, self.specialization)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return Path(triton.knobs.cache.dir) / "nvfp4_sgl_compiled" / digest


class _Noted:
    """Stands for a loaded kernel that has been noted: its launches do nothing."""

    function = packed_metadata = None

    def run(self, *arguments: object) -> None:
        pass

    def launch_metadata(self, *arguments: object) -> None:
        pass


_NOTED = _Noted()
_is_recording = False


@contextmanager
def recording() -> Iterator[dict[Variant, None]]:
    """Record launches of this package's kernels, in order, instead of making them; others' kernels are left alone.

    Those that the process has loaded are among them: what they would read has not been computed here.

    Raises:
        RuntimeError: Triton's interpreter is on, which compiles nothing.
    """
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1: the interpreter compiles nothing that could be noted; unset it")
    global _is_recording
    noted: dict[Variant, None] = {}
    before, before_recording = triton.knobs.runtime.jit_cache_hook, _is_recording

    def note(**launch: Any) -> bool:
        kernel = launch["fn"]
        if not kernel.module.startswith(PACKAGE):
            return bool(before(**launch)) if before is not None else False
        described = launch["compile"]
        source = pickle.dumps((described["signature"], described["constants"], described["configs"][0]))
        noted[Variant(kernel.module, kernel.name, described["specialization_data"], source)] = None
        # A warm-up launches each variant some sixty times: Triton asks once, and finds this afterwards.
        kernel.jit_function.device_caches[described["device"]][0][launch["key"]] = _NOTED
        return True

    triton.knobs.runtime.jit_cache_hook, _is_recording = note, True
    try:
        with _nothing_loaded():
            yield noted
    finally:
        triton.knobs.runtime.jit_cache_hook, _is_recording = before, before_recording


def is_recording() -> bool:
    """Whether launches are recorded instead of made; what they would write stays as it was allocated."""
    return _is_recording


@contextmanager
def _nothing_loaded() -> Iterator[None]:
    """Triton finds none of this package's kernels loaded, so that it asks the hook of each launch."""
    kernels = [kernel for kernel in _triton_jit_function_registry.values() if kernel.module.startswith(PACKAGE)]
    loaded = [kernel.device_caches for kernel in kernels]
    for kernel in kernels:
        kernel.device_caches = defaultdict(kernel.create_binder)
    try:
        yield
    finally:
        for kernel, caches in zip(kernels, loaded, strict=True):
            kernel.device_caches = caches


@contextmanager
def compiled_here() -> Iterator[list[str]]:
    """Names of this package's kernels that launches in the block compile, in this process and one after the other."""
    found: list[str] = []
    before = triton.knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **more: Any) -> None:
        if not cache_hit and isinstance(src, ASTSource) and src.fn.module.startswith(PACKAGE):
            found.append(src.name)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **more)

    triton.knobs.compilation.listener = listen
    try:
        yield found
    finally:
        triton.knobs.compilation.listener = before


_numbers = itertools.count()


class _Stand:
    """Enough of a driver to specialise and compile for a GPU; it cannot launch."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        # Triton keeps what it has loaded by device: none of another stand-in's can be launched here.
        self._device = f"stand-in {next(_numbers)} for sm_{capability}"

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, WARP)

    def get_current_device(self) -> str:
        return self._device

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def targeting(capability: int, processors: int) -> Iterator[None]:
    """Specialise and compile for a GPU that is not here.

    Args:
        capability: its compute capability, e.g. 90.
        processors: its multiprocessors, by which some tilings are chosen.
    """
    before = driver._active
    driver.set_active(_Stand(capability))
    checks.forget()
    try:
        with chip.assume(processors):
            yield
    finally:
        driver._active = before
        checks.forget()


@contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    """Let Triton's cache be in ``folder``, in processes that are started inside, too."""
    with triton.knobs.cache.scope():  # sets TRITON_CACHE_DIR and restores it
        triton.knobs.cache.dir = str(folder)
        yield


def adopt(folder: Path, variants: Iterable[Variant] | None = None) -> None:
    """Copy what another cache ``folder`` holds into Triton's, where it is not there yet.

    Args:
        variants: those to copy; all that is in ``folder`` if ``None``.
    """
    if variants is not None:
        with cached_in(folder):
            held = [file for variant in variants for file in variant.files()]
    for source in folder.glob("*/*") if variants is None else held:
        target = Path(triton.knobs.cache.dir, *source.parts[-2:])  # lists of a cache that was moved name its old place
        if target.exists():
            continue
        content = source.read_bytes()
        if source.name.startswith(GROUP):
            content = _moved(content, target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        _put(target, content)


def _put(file: Path, content: bytes) -> None:
    """Write a file and move it into place when it is complete: other processes read the folder."""
    # Not a temporary file's mode, which lets nobody else read: one user may build and another serve.
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.rename(file)
    finally:
        beside.unlink(missing_ok=True)


def _moved(group: bytes, folder: Path) -> bytes:
    """Triton's list of a kernel's files, which has their whole paths, with the files in ``folder``."""
    held = json.loads(group)
    return json.dumps({**held, "child_paths": {name: str(folder / name) for name in held["child_paths"]}}).encode()
