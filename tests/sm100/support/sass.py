"""What ptxas made of a kernel: its SASS and its resources, read with the tools that Triton's package carries."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.sm100.emulator import compile_for


@cache
def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        opcodes: static SASS instructions by full opcode.
        registers: per thread. stack, local: bytes per thread; not zero where registers are spilled.
    """

    opcodes: Counter[str]
    registers: int
    stack: int
    local: int

    def count(self, prefix: str) -> int:
        """Instructions whose opcode begins with ``prefix``."""
        return sum(number for opcode, number in self.opcodes.items() if opcode.startswith(prefix))


def compile_binary(architecture: str, function: Any, *arguments: Any) -> Binary:
    """Compile for an architecture and take the result apart."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compile_for(architecture, function, *arguments, options="--keep-cubin").function.__cubin__)
        sass, usage = (
            subprocess.run([_tool(name), *flags, str(path)], check=True, capture_output=True, text=True).stdout
            for name, *flags in (("nvdisasm", "-c"), ("cuobjdump", "--dump-resource-usage"))
        )
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass, re.M)
    resources = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Binary(Counter(opcodes), resources["REG"], resources["STACK"], resources["LOCAL"])
