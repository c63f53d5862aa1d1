"""Compiles the kernels of a warm-up in parallel, before it runs: Triton's into Triton's cache, GEMMs into a library.

A dry pass first tells what the warm-up needs (:mod:`nvfp4_sgl.triton_kernels.ahead`). Processes of their own then
compile what no cache holds: a kernel takes about a second of one core, and the compilers hold Python's lock. Ranks of a
host share the result: the first compiles, the others wait and load.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import triton

from nvfp4_sgl.cutedsl_kernels import library
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.errors import LibraryError
from nvfp4_sgl.cutedsl_kernels.library import LIBRARY, MANIFEST, export, link, names_in
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.ahead import Variant

logger = logging.getLogger(__name__)

LIBRARY_VARIABLE = "NVFP4_SGL_KERNELS"
"""Environment variable: the folder of kernels built ahead of time."""
TRITON_FOLDER = "triton"
"""Folder of Triton's kernels inside one that was built for another machine."""
MAX_PROCESSES = 64
"""Processes that compile at a time; a bound for hosts with very many cores, not measured."""
OTHER_ARCHITECTURE = "sm_80"
"""CuTeDSL's own architecture in processes that compile: none that kernels are compiled for, which each key says itself.

Left to itself CuTeDSL initialises the driver in every process to find out, and readies code to run if it could.
"""
LOG_CHARACTERS = 2000
"""Characters of a failed process's output that an error quotes."""


@dataclass(frozen=True)
class Job:
    """The state that the compiling processes share; each takes the next task that has no claim yet.

    Attributes:
        tasks: kernels to compile. capability: what Triton compiles for, e.g. 90.
        objects: where object files, claims and names of entries go.
    """

    tasks: Sequence[KernelKey | Variant]
    capability: int
    objects: Path

    def claim(self) -> Iterator[tuple[int, KernelKey | Variant]]:
        """Tasks that no other process has taken."""
        for index, task in enumerate(self.tasks):
            try:
                os.close(os.open(self.objects / f"{index}.claim", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            yield index, task

    def entry_file(self, index: int) -> Path:
        """The file that holds the name of a GEMM's entry."""
        return self.objects / f"{index}.entry"


def cache_root() -> Path:
    """The user's cache folder of this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nvfp4-sgl"


def library_folder(keys: Iterable[KernelKey]) -> Path:
    """The folder of the library of these kernels, by all that they are made from."""
    made_from = json.dumps([library.fingerprint(), sorted(key.name for key in keys)], sort_keys=True)
    return cache_root() / "libraries" / hashlib.sha256(made_from.encode()).hexdigest()[:32]


def given_folder() -> Path | None:
    """The folder of kernels built ahead of time, by the environment."""
    given = os.environ.get(LIBRARY_VARIABLE)
    return Path(given) if given else None


def adopt_given(folder: Path) -> None:
    """Check a ``folder`` of kernels built ahead of time, and copy its Triton kernels into Triton's cache.

    Raises:
        LibraryError: there are no kernels in it, its library is damaged or built from other sources, or Triton's cache
            cannot be written.
    """
    if any((folder / name).exists() for name in (MANIFEST, LIBRARY)):
        names_in(folder)
    elif not (folder / TRITON_FOLDER).is_dir():  # a model whose GEMMs are all PyTorch's has these alone
        raise LibraryError(
            f"{LIBRARY_VARIABLE}={folder}: expected the folder that 'nvfp4-sgl build --output' wrote, found neither"
            f" {MANIFEST} nor {TRITON_FOLDER}/ there; correct it, or unset it to compile here"
        )
    try:
        ahead.adopt(folder / TRITON_FOLDER)
    except OSError as error:
        raise LibraryError(
            f"{triton.knobs.cache.dir}: expected a folder to copy the Triton kernels of {LIBRARY_VARIABLE}={folder} to:"
            f" {error}; let TRITON_CACHE_DIR name one that can be written"
        ) from None


def folder_of(keys: Sequence[KernelKey], given: Path | None) -> Path:
    """The folder where a server finds a library of ``keys``: ``given`` if it has all, or else the user's cache.

    Raises:
        LibraryError: the library that is given is missing, damaged or built from other sources.
    """
    # A model whose GEMMs are all PyTorch's needs none of these, and a build for it has none.
    if given is None or not keys:
        return library_folder(keys)
    lacking = {key.name for key in keys} - names_in(given)
    if not lacking:
        return given
    logger.warning(
        "%s=%s: %d of %d GEMMs are not there and are compiled now; build it again for this model, --tp-size and"
        " --chunked-prefill-size", LIBRARY_VARIABLE, given, len(lacking), len(keys),
    )  # fmt: skip
    return library_folder(keys)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Processes of this user run one after another.

    Raises:
        LibraryError: the cache folder cannot be written.
    """
    try:
        cache_root().mkdir(parents=True, exist_ok=True)
        file = (cache_root() / "compiling").open("w")
    except OSError as error:
        raise LibraryError(
            f"{cache_root()}: expected a folder to keep compiled kernels in, found none that can be written: {error};"
            " let XDG_CACHE_HOME name one that can"
        ) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def copy_cached(keys: Sequence[KernelKey], variants: Iterable[Variant], folder: Path, triton_cache: Path) -> None:
    """Copy what this user's caches hold of ``keys`` and ``variants`` to where :func:`compile_missing` looks for it.

    GEMMs are copied if a library of just these ``keys`` is there, as of a server without a draft, and ``folder`` lacks
    one. What cannot be read is left to be compiled.

    Args:
        folder: as of :func:`compile_missing`. triton_cache: the user's.

    Raises:
        LibraryError: ``folder`` cannot be written.
    """
    missing = [variant for variant in variants if not variant.is_compiled]
    gemms, cached = _gemms_to_compile(keys, folder), library_folder(keys)
    if _gemms_to_compile(gemms, cached):
        gemms = []
    try:
        ahead.adopt(triton_cache, missing)
        if gemms:
            library.copy(cached, folder)
    except OSError as error:
        logger.warning("kernels of this user's caches cannot be copied: %s", error)
    kernels = sum(variant.is_compiled for variant in missing)
    if gemms or kernels:
        logger.info("copied %d GEMMs and %d Triton kernels from this user's caches", len(gemms), kernels)


def compile_missing(keys: Sequence[KernelKey], variants: Iterable[Variant], folder: Path, capability: int) -> None:
    """Compile the GEMMs of ``keys`` into a library in ``folder`` unless one is there, and ``variants`` for Triton.

    A library in ``folder`` that is damaged, stale or lacks one of ``keys`` is replaced by one of ``keys`` alone.

    Args:
        capability: what Triton compiles for: the device's or, under :func:`.ahead.targeting`, the one stood in for.

    Raises:
        LibraryError: a kernel does not compile, or the linker failed, with the compiler's output; or something is
            missing and the user's cache folder, or ``folder``, cannot be written.
    """
    variants = list(variants)
    # Without the lock first: a server whose kernels are all there needs no cache folder and waits for no other.
    if not _gemms_to_compile(keys, folder) and all(variant.is_compiled for variant in variants):
        return
    with _one_at_a_time():
        # Again: another process may have compiled them while this one waited.
        missing = [variant for variant in variants if not variant.is_compiled]
        gemms = _gemms_to_compile(keys, folder, say=True)
        if not missing and not gemms:
            return
        started, used = time.monotonic(), _processor_seconds()
        count = _processes(len(gemms) + len(missing))
        names = "".join(f"; {name} {times}" for name, times in Counter(variant.name for variant in missing).items())
        logger.info(
            "compiling %d GEMMs and %d Triton kernels with %d processes%s", len(gemms), len(missing), count, names
        )
        # Processes that end because this one was told to may still write there.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as objects:
            # A GEMM takes longer than most Triton kernels: those first.
            job = Job([*gemms, *missing], capability, Path(objects))
            _run(job, count)
            if gemms:
                entries = {key: job.entry_file(index).read_text() for index, key in enumerate(gemms)}
                link(entries, job.objects, folder)
        seconds, used = time.monotonic() - started, _processor_seconds() - used
        logger.info("compiled in %.1f s, with %.0f s of processor time", seconds, used)


def _gemms_to_compile(keys: Sequence[KernelKey], folder: Path, say: bool = False) -> Sequence[KernelKey]:
    """All of ``keys``, or none if the library in ``folder`` holds them.

    Args:
        say: whether to log why a library that is there does not do.
    """
    if not keys or not any((folder / name).exists() for name in (MANIFEST, LIBRARY)):
        return keys
    try:
        lacking = {key.name for key in keys} - names_in(folder)
    except LibraryError as error:
        if say:
            logger.warning("compiling a library again that cannot be used: %s", error)
        return keys
    if lacking and say:
        logger.warning("%s: %d of %d GEMMs are not there: compiling all again", folder, len(lacking), len(keys))
    return keys if lacking else []


def _processor_seconds() -> float:
    """Seconds of processor time of this process's ended children; far below processes times seconds if they wait."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _processes(tasks: int) -> int:
    return min(len(os.sched_getaffinity(0)), MAX_PROCESSES, tasks)


def _run(job: Job, processes: int) -> None:
    """Compile ``job`` in processes of its own."""
    path = job.objects / "job"
    path.write_bytes(pickle.dumps(job))
    # They must find the modules that this process has, wherever these came from; they need no GPU.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "CUDA_VISIBLE_DEVICES": "",
        "CUTE_DSL_ARCH": OTHER_ARCHITECTURE,
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(triton.knobs.cache.dir),
    }
    worker = "nvfp4_sgl.targets.fused.compile_worker"
    command = [sys.executable, "-m", worker, str(path), str(processes), str(os.getpid())]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise LibraryError(f"compiling kernels failed: {done.stdout.strip()[-LOG_CHARACTERS:]}")


def work(job: Job) -> None:
    """Compile tasks until none is left; what each of the processes does."""
    for index, task in job.claim():
        try:
            if isinstance(task, KernelKey):
                job.entry_file(index).write_text(export(task, job.objects))
            else:
                task.compile()
        except Exception as error:
            error.add_note(f"while compiling {task}")
            raise
