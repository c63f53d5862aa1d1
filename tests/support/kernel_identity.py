"""Hashes of the kernels that servers need, to show that a change of the sources left their code alone.

``python -m tests.support.kernel_identity OUT.json`` writes the list; ``... OUT.json BEFORE.json`` also compares it with
an earlier one and ends with 1 where they differ. No GPU is needed; it takes a few minutes on one core.

The list holds every key of a GEMM and every Triton variant that servers of tiny models and of Flash need, on every
target in every mode. Of each family one kernel is compiled and its PTX hashed: a family of GEMMs is an architecture,
kind of operands, output, and whether the kernel is grouped, gated or gathers; a Triton family is a function on an
architecture.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from nvfp4_sgl.build import Serving, needed
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey, compile_kernel
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.target import descriptor, modes, words
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.ahead import Variant
from tests.support.released import FLASH, config_json

TINY = ("nvfp4-full", "nvfp4-experts", "deepseek")
"""Formats of tiny checkpoints; a target may refuse one."""
FLASH_RANKS, CAPACITY, REQUESTS, CHUNK = 8, 1024, 6, 256
NOT_CODE = re.compile(r"^\s*(?:\.file|\.loc|//|\.section\s+\.debug).*$|//.*$|(?<=_)[0-9a-f]{12,}(?![0-9a-zA-Z])", re.M)
"""Parts of PTX that change with line numbers, folders and hashes in names."""


def checkpoints(folder: Path) -> Iterator[tuple[str, Verified, Serving]]:
    """Models with what a server of each is asked for."""
    for name in TINY:
        write_tiny(folder / name, name, seed=11)
        yield name, verify(folder / name), Serving(1, CAPACITY, REQUESTS, CHUNK)
    flash = folder / "flash"
    flash.mkdir()
    (flash / "config.json").write_text(json.dumps(config_json(FLASH)))
    yield "flash", verify_dummy(flash), Serving(FLASH_RANKS, CAPACITY, REQUESTS, CHUNK)


def family(task: KernelKey | Variant) -> str:
    """Kernels with the same name here differ in tiles and alignments alone."""
    if isinstance(task, Variant):
        architecture = json.loads(task.specialization)["target"]
        return f"triton {architecture} {task.module}.{task.name}"
    shape = task.shape
    fields = ("operands", "weights", "output", "grouped", "gated", "gathers", "counts_ahead", "stream_k", "pair")
    words = [f"{name}={getattr(shape, name)}" for name in fields if hasattr(shape, name)]
    return " ".join(("gemm", task.architecture, *words))


def ptx_of(task: KernelKey | Variant, capability: int, folder: Path) -> str:
    """The kernel's code without what :data:`NOT_CODE` names."""
    folder.mkdir()
    if isinstance(task, KernelKey):
        text = str(compile_kernel(task, f"--keep-ptx --dump-dir {folder}").__ptx__)
    else:
        with ahead.targeting(capability, 1), ahead.cached_in(folder):
            task.compile()
        (file,) = folder.rglob(f"{task.name}.ptx")
        text = file.read_text()
    return NOT_CODE.sub("", text.partition(".section\t.debug")[0])


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def kernels() -> dict[str, Sequence[str] | str]:
    """By what needs them the names of kernels; by family the hash of one kernel's PTX."""
    found: dict[str, Sequence[str] | str] = {}
    chosen: dict[str, tuple[KernelKey | Variant, int]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, verified, serving in checkpoints(folder):
            for target in filter(lambda word: descriptor(word).gpu_in, words()):
                gpu = descriptor(target).gpu()
                for mode in modes(target):
                    asked = Serving(serving.ranks, serving.context, serving.requests, serving.chunk, mode=mode)
                    keys, variants = needed(verified, target, asked, gpu)
                    where = f"{name} {target} {mode.value}"
                    found[f"{where} GEMMs"] = [repr(key) for key in keys]
                    described = (f"{one.module}.{one.name} {digest(one.specialization)}" for one in variants)
                    found[f"{where} Triton"] = sorted(described)
                    tasks: list[KernelKey | Variant] = [*sorted(keys, key=repr), *sorted(variants, key=repr)]
                    for task in tasks:
                        chosen.setdefault(family(task), (task, gpu.capability))
        for number, (name, (task, capability)) in enumerate(sorted(chosen.items())):
            found[name] = digest(ptx_of(task, capability, folder / str(number)))
            print(f"{number + 1}/{len(chosen)} {name}", file=sys.stderr)
    return found


def differing(found: dict[str, Sequence[str] | str], before: dict[str, Sequence[str] | str]) -> list[str]:
    """Names of what is not in both lists alike."""
    return sorted(name for name in found.keys() | before.keys() if found.get(name) != before.get(name))


def main(out: str, before: str | None = None) -> int:
    """Write the list to ``out``; 1 if it differs from the one in ``before``."""
    found = kernels()
    Path(out).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    changed = differing(found, json.loads(Path(before).read_text())) if before else []
    print(*(f"differs: {name}" for name in changed), f"{len(found)} entries, {len(changed)} differ", sep="\n")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
