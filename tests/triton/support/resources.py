"""What the compiler makes of launches: registers, spills and shared memory per architecture, without a GPU.

A test file defines ``launches()``, which calls the ops under test at their real widths on CPU tensors. Here, in a
process without the interpreter, every kernel it would launch is compiled exactly as the launch would compile it (same
specialisation, same options) and nothing runs::

    @pytest.mark.parametrize("usage", resources(__name__), ids=str)
    ...
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ARCHITECTURES = (90, 100)
SHARED_LIMIT = 227 * 1024
"""Bytes a block may have, on both."""
READ_CONSTANTS_EARLY = {"_router_logits", "_router_logits_split"}
"""Kernels that read before they have waited for the previous kernel: nothing but weights, which none writes."""
LAUNCHED_ORDINARILY = {"attend", "attend_block"}
"""Kernels that begin when the previous one has ended; ``sparse_attention`` says why."""


@dataclass(frozen=True)
class Resources:
    """Resources of one compiled kernel.

    Attributes:
        registers: per thread. stack, local: bytes per thread, where registers are spilled. shared: bytes per block.
        ptx: how often each PTX instruction occurs, by its full name: which roundings the compiler chose.
        group_waits: machine instructions that wait for products of warp groups. One after each says that the assembler
            could not run them together, and they take cos_sin with their latency.
        fused_shuffles: sums of another lane's number with a product that was not rounded. Two lanes that exchange their
            numbers so have different sums of the same two.
        early_loads: machine instructions that load before the kernel has waited for the previous one.
    """

    kernel: str
    architecture: int
    warps: int
    registers: int
    stack: int
    local: int
    shared: int
    ptx: dict[str, int]
    group_waits: int
    fused_shuffles: int
    early_loads: int

    def count(self, prefix: str) -> int:
        """PTX instructions whose name begins with ``prefix``."""
        return sum(number for name, number in self.ptx.items() if name.startswith(prefix))

    def require_exact_arithmetic(self) -> None:
        """No approximate reciprocal, division, root or trigonometric function."""
        approximate = [name for name in self.ptx if ".approx" in name or name.startswith("div.full")]
        assert not approximate, f"{self.kernel}: {approximate}"

    def require_no_spills(self) -> None:
        assert self.stack == 0 and self.local == 0, f"registers are spilled: {self}"
        assert self.shared <= SHARED_LIMIT, f"too much shared memory: {self}"


@cache
def resources(module: str) -> list[Resources]:
    """Every kernel that ``launches()`` of the module launches, each specialisation once, for both architectures."""
    # Triton's own assembler and cache: SGLang, once imported, names others in the environment, and another assembler
    # gives other registers and stacks.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    command = [sys.executable, "-m", __name__, module]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module}: a kernel does not compile\n{done.stdout}{done.stderr}")
    return [Resources(**entry) for entry in json.loads(done.stdout.splitlines()[-1])]


class _StubDriver:
    """Enough of a driver to compile for; one device per architecture, since kernels are cached by device."""

    def __init__(self) -> None:
        self.architecture = ARCHITECTURES[0]

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile_all(launches: Callable[[], None]) -> list[Resources]:
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from nvfp4_sgl.formats import checks

    stub = _StubDriver()
    driver.set_active(stub)
    run = JITFunction.run
    compiled: dict[tuple[int, str], Any] = {}

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled[stub.architecture, kernel.hash] = kernel

    JITFunction.run = record
    for architecture in ARCHITECTURES:
        stub.architecture = architecture
        checks.forget()
        launches()
    return [_resources(kernel, architecture) for (architecture, _), kernel in compiled.items()]


def _require_it_waits(metadata: Any, machine_code: str) -> None:
    """Kernels may begin during the one before them; none touches memory until it has waited (ACQBULK) for its end.

    But for weights that some read, which are constants; those read the rest, and they do read some, afterwards.
    """
    before, wait, after = machine_code.partition("ACQBULK")
    overlapped = metadata.name not in LAUNCHED_ORDINARILY
    if not (wait and metadata.launch_pdl == overlapped):
        how = "" if overlapped else "no "
        raise RuntimeError(f"{metadata.name}: expected after_previous() first, and {how}OVERLAPPED at its launch")
    early = set(re.findall(r"\b(LD|ST|LDG|STG|LDGSTS|ATOM|ATOMG|RED|REDG|UBLKCP|UTMALDG)\.", before))
    if early - ({"LDG"} if metadata.name in READ_CONSTANTS_EARLY else set()):
        raise RuntimeError(f"{metadata.name}: {sorted(early)} before it waits for the previous kernel")
    if early and "LDG." not in after:
        raise RuntimeError(f"{metadata.name}: reads nothing after it has waited for the previous kernel")


def _fused_shuffles(machine_code: str) -> int:
    found, shuffled = 0, set[int]()
    instruction = re.compile(r"\*/ +(?:@!?U?P\w+ +)?([A-Z][\w.]*) +([^;\n]*);")
    for name, operands in instruction.findall(machine_code):
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", operands)]
        if name.startswith("SHFL."):
            shuffled.add(registers[0])
            continue
        if name.startswith("FFMA") and len(registers) == 4:
            found += registers[3] in shuffled
        if operands.startswith("R") and registers:
            width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
            shuffled.difference_update(range(registers[0], registers[0] + width))
    return found


def lost_negations(ptx: str) -> list[str]:
    """Registers negated, then in the first of two maxima (or minima), one of the other: ptxas may lose the negation.

    Of ``neg.s32 n, x; max.s32 m, a, n; max.s32 r, m, c`` ptxas 12.9, 13.0 and 13.3 make ``VIMNMX3 r, a, c, x`` for
    sm_90 and sm_100: x as it is; so too if it is 0 - x, x times -1, or of 16 bits. An absolute value is the maximum of
    x and its negation, and judged alike. It is the PTX that is judged: what one ptxas gets right the next may not.
    """
    negated, extrema = set(), []
    for name, to, operands in re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.]*)\s+(%\w+), *([^;]*);", ptx, re.M):
        first, *others = operands.split(", ")
        kind, _, size = name.rpartition(".")
        if kind in ("max", "min") and size in ("s16", "s32"):
            extrema.append((name, to, (first, *others)))
        elif (
            kind in ("neg", "abs")
            or (kind == "sub" and first == "0")
            or (kind == "mul.lo" and "-1" in others)
            or (kind == "mov" and first in negated)
        ):
            negated.add(to)
    taken_in = {(name, operand) for name, _, operands in extrema for operand in operands}
    of_three = [operands for name, to, operands in extrema if (name, to) in taken_in]
    return [operand for operands in of_three for operand in operands if operand in negated]


def _require_negations_kept(metadata: Any, ptx: str) -> None:
    if found := lost_negations(ptx):
        raise RuntimeError(f"{metadata.name}: ptxas may lose the negations {found}; use ~, or a difference")


def _resources(kernel: Any, architecture: int) -> Resources:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        command = [str(tool), "--dump-resource-usage", "--dump-sass", str(cubin)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    _require_it_waits(kernel.metadata, text)
    _require_negations_kept(kernel.metadata, kernel.asm["ptx"])
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return Resources(
        kernel=kernel.metadata.name,
        architecture=architecture,
        warps=kernel.metadata.num_warps,
        registers=usage["REG"],
        stack=usage["STACK"],
        local=usage["LOCAL"],
        shared=kernel.metadata.shared,
        ptx=dict(Counter(re.findall(r"^\s+(?:@!?%\w+\s+)?([a-z]\w*(?:\.[\w:]+)*)\s", kernel.asm["ptx"], re.M))),
        group_waits=text.count("WARPGROUP.DEPBAR"),
        fused_shuffles=_fused_shuffles(text),
        early_loads=len(re.findall(r"\bLDG\.", text.partition("ACQBULK")[0])),
    )


if __name__ == "__main__":
    print(json.dumps([asdict(usage) for usage in _compile_all(importlib.import_module(sys.argv[1]).launches)]))
