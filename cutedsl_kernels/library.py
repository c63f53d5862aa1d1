"""Kernels compiled ahead of time: a shared library of their code, and a manifest of its kernels.

A library is valid for the sources and the CuTeDSL version that it was built from. Loading compares both, so that stale
code is refused instead of run. Its kernels have the C interface of ``common/native.py``; loading them compiles nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nvfp4_sgl.limits import MAX_GEMM_EXPERTS

from .common.arguments import Arguments
from .common.native import NativeKernel, describe_error
from .compiled import KernelKey, compile_kernel
from .errors import LaunchError, LibraryError

MANIFEST, LIBRARY = "kernels.json", "libnvfp4_kernels.so"
MANIFEST_FORMAT = 1
"""Version of the manifest's format."""
DSL = "nvidia-cutlass-dsl"
SOURCES = Path(__file__).parent
KERNEL_FOLDERS = ("common", "sm90", "sm100")
"""Folders of ``SOURCES`` that kernels are built from."""
CHOOSING_SOURCES = ("choose.py", "cost.py")
"""Sources that choose kernels and do not change their code."""


def kernel_sources(folder: Path) -> list[Path]:
    """The files below ``folder``, a copy of this one, that kernels are built from."""
    files = [file for name in KERNEL_FOLDERS for file in sorted((folder / name).glob("*.py"))]
    return [file for file in files if file.name not in CHOOSING_SOURCES]


def fingerprint() -> dict[str, object]:
    """Everything but its key that a kernel's code depends on: sources, interface, limits and CuTeDSL version."""
    digest = hashlib.sha256()
    for file in kernel_sources(SOURCES):
        digest.update(file.relative_to(SOURCES).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return {
        "format": MANIFEST_FORMAT,
        "sources": digest.hexdigest(),
        "interface": list(Arguments._fields),
        "experts": MAX_GEMM_EXPERTS,
        DSL: version(DSL),
    }


def export(key: KernelKey, objects: Path, compiled: Any = None) -> str:
    """Write a kernel's object file ``<name>.o`` to ``objects`` and return the name of its entry.

    Needs no GPU, but then CuTeDSL's runtime library (:func:`find_runtime`) must have been loaded.

    Args:
        compiled: the result of ``cute.compile``, if there is one already.
    """
    compiled = compiled or compile_kernel(key)
    compiled.export_to_c(file_path=str(objects), file_name=key.name, function_prefix=key.name)
    return str(compiled.function_name)


def link(entries: Mapping[KernelKey, str], objects: Path, folder: Path, linker: str = "gcc") -> None:
    """Link the objects of kernels, whose entries are given, into a library in ``folder``.

    The manifest is written last, and each file appears complete: a build that is cut off leaves no library, and a
    process that has loaded the old one keeps it.

    Raises:
        LibraryError: the linker failed, or there is none; or ``folder`` cannot be written.
    """
    library = objects / LIBRARY
    command = [linker, "-shared", "-o", str(library), *(f"{objects}/{key.name}.o" for key in entries)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise LibraryError(f"{linker}: expected a C compiler to link {LIBRARY} with, found none; install one") from None
    if done.returncode:
        raise LibraryError(f"{LIBRARY}: {linker} failed: {done.stderr.strip()[-500:]}")
    code = library.read_bytes()
    kernels = {key.name: {"kernel": repr(key), "entry": entry} for key, entry in entries.items()}
    manifest = fingerprint() | {"sha256": hashlib.sha256(code).hexdigest(), "kernels": kernels}
    _write(folder, code, (json.dumps(manifest, indent=1) + "\n").encode())


def copy(source: Path, folder: Path) -> None:
    """Copy the library in ``source`` to ``folder``.

    Raises:
        LibraryError: ``folder`` cannot be written.
    """
    _write(folder, (source / LIBRARY).read_bytes(), (source / MANIFEST).read_bytes())


def _write(folder: Path, code: bytes, manifest: bytes) -> None:
    """Write a library to ``folder``, the manifest last."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        _put(folder / LIBRARY, code)
        _put(folder / MANIFEST, manifest)
    except OSError as error:
        raise LibraryError(
            f"{folder}: expected a folder to write {LIBRARY} to, found none: {error}; make it writable, or make room"
        ) from None


def _put(file: Path, content: bytes) -> None:
    """Write a file beside its place and move it there when it is complete."""
    # Not a temporary file's mode, which lets nobody else read: one user may build and another serve.
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.rename(file)
    finally:
        beside.unlink(missing_ok=True)


class Library:
    """A loaded library: a source of kernels for :class:`.compiled.KernelCache`.

    Args:
        folder: the folder that :func:`link` wrote.
        runtime: CuTeDSL's runtime library, which the code calls; found in the installed CuTeDSL if not given.
        device: the device to load each kernel into; the current one if not given. On another, CUDA refuses a launch.

    Raises:
        LibraryError: the library is missing, damaged, or built from other sources or another CuTeDSL.
    """

    def __init__(self, folder: Path, runtime: Path | None = None, device: int | None = None) -> None:
        self.folder = folder
        self._entries = _read_entries(folder)
        # The code leaves the runtime's functions undefined, so the runtime must be loaded before it.
        self._runtime = ctypes.CDLL(str(runtime or find_runtime()), mode=ctypes.RTLD_GLOBAL)
        try:
            self._library = ctypes.CDLL(str(folder / LIBRARY))
        except OSError as error:
            raise LibraryError(
                f"{folder / LIBRARY}: expected a library for this machine: {error}; rebuild it here"
            ) from None
        self._device = device

    @property
    def names(self) -> set[str]:
        """Names of the library's kernels."""
        return set(self._entries)

    def kernel(self, key: KernelKey) -> NativeKernel | None:
        """The kernel of a key, loaded into the device; None if the library lacks it.

        Raises:
            LaunchError: CUDA refused the code.
        """
        entry = self._entries.get(key.name)
        if entry is None:
            return None
        self._load(key.name)
        address = ctypes.cast(self._symbol(f"_mlir_{key.name}__mlir_ciface_{entry['entry']}"), ctypes.c_void_p).value
        assert address is not None
        return NativeKernel(key.name, address, self._library)

    def _load(self, name: str) -> None:
        """Do what the exported header does: make a CUDA library of the code, then load its kernels to a device."""
        handle, error, device = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_int32()
        values = (ctypes.pointer(handle), device, error)
        at_handle, at_device, at_error = (ctypes.pointer(value) for value in values)
        self._call(f"_mlir_{name}_cuda_init", at_handle, at_error)
        if not error.value:
            device.value = _current_device() if self._device is None else self._device
            self._call(f"_mlir_{name}_cuda_load_to_device", at_handle, at_device, at_error)
        if error.value:
            raise LaunchError(f"{name}: CUDA error {error.value} ({describe_error(error.value)}) while loading it")

    def _call(self, symbol: str, *pointers: Any) -> None:
        """Call a function of the module, which takes an array of pointers to its arguments."""
        slots = [ctypes.cast(pointer, ctypes.c_void_p) for pointer in pointers]
        self._symbol(symbol)((ctypes.c_void_p * len(slots))(*slots))

    def _symbol(self, name: str) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise LibraryError(f"{self.folder / LIBRARY}: no symbol {name}; rebuild the library") from None
        function.restype = None
        return function


def find_runtime() -> Path:
    """The path of CuTeDSL's runtime library.

    Raises:
        LibraryError: the installed CuTeDSL has none.
    """
    from cutlass.cute.runtime import find_runtime_libraries

    found = find_runtime_libraries(enable_tvm_ffi=False)
    if not found:
        raise LibraryError(f"libcute_dsl_runtime.so: not found in the installed {DSL} {version(DSL)}; reinstall it")
    return Path(found[0])


def names_in(folder: Path) -> set[str]:
    """Names of the kernels in the library in ``folder``, which is checked as for loading and not loaded.

    Raises:
        LibraryError: the library is missing, damaged, or built from other sources or another CuTeDSL.
    """
    return set(_read_entries(folder))


def _read_entries(folder: Path) -> dict[str, dict[str, str]]:
    """The manifest's entry of each kernel, by its name, after both files have been checked."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        code = (folder / LIBRARY).read_bytes()
    except (OSError, ValueError) as error:
        raise LibraryError(
            f"{folder}: expected {MANIFEST} and {LIBRARY}, as the build writes them: {error}; rebuild the library"
        ) from None
    if not isinstance(manifest, dict):
        raise LibraryError(
            f"{folder / MANIFEST}: expected a JSON object, found {type(manifest).__name__}; rebuild the library"
        )
    for name, wanted in fingerprint().items():
        if manifest.get(name) != wanted:
            raise LibraryError(
                f"{folder / MANIFEST}: {name}: expected {wanted}, found {manifest.get(name)}; the library was built"
                " from something else: rebuild it"
            )
    if hashlib.sha256(code).hexdigest() != manifest.get("sha256"):
        raise LibraryError(f"{folder / LIBRARY}: not the file that {MANIFEST} describes; rebuild the library")
    entries = manifest.get("kernels")
    if not isinstance(entries, dict):
        raise LibraryError(f"{folder / MANIFEST}: kernels: expected an object, found {entries!r}; rebuild the library")
    return entries


def _current_device() -> int:
    import torch

    return torch.cuda.current_device()
