"""NUMA nodes of this host, those of its GPUs, and whether a server's ranks will run on the CPUs near their GPU.

A rank that runs on another socket than its GPU's launches later. SGLang binds each rank to its GPU's node, by the
program ``numactl``; where it is not installed, SGLang says nothing and binds nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

SYSFS = Path("/sys")
SWITCH = "SGLANG_AUTO_NUMA_BIND"
"""SGLang's variable; false leaves ranks where they are."""
OFF = ("false", "0", "no", "n")
INSTALL = "apt-get install numactl"


def parse_cpus(text: str) -> set[int]:
    """CPU numbers of a list such as ``0-3,8``; a node may have none."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def nodes(sysfs: Path) -> dict[int, str]:
    """The list of CPUs of each node."""
    found = (sysfs / "devices" / "system" / "node").glob("node[0-9]*/cpulist")
    return dict(sorted((int(file.parent.name.removeprefix("node")), file.read_text().strip()) for file in found))


def node_of(address: str, sysfs: Path) -> int | None:
    """The node of the device at a PCI ``address`` such as ``0000:1b:00.0``; ``None`` if the system does not say."""
    try:
        node = int((sysfs / "bus" / "pci" / "devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def describe(
    gpus: Mapping[str, str],
    *,
    allowed: Collection[int],
    has_numactl: bool,
    environment: Mapping[str, str],
    sysfs: Path,
) -> list[str]:
    """Lines on the nodes, the GPUs and the ranks; none on a host of one node or without GPUs.

    Args:
        gpus: PCI addresses by name. allowed: CPUs that this process may use.
        has_numactl: whether the program is found. environment: variables of the server.
    """
    cpus = nodes(sysfs)
    if len(cpus) < 2 or not gpus:
        return []
    near = {name: node_of(address, sysfs) for name, address in gpus.items()}
    lines = [f"node {node}: CPUs {text or 'none'}" for node, text in cpus.items()]
    lines += [f"{name}: node {'unknown' if node is None else node}" for name, node in near.items()]
    known = sorted({node for node in near.values() if node is not None and parse_cpus(cpus.get(node, ""))})
    if not known:
        return [*lines, "ranks: not bound, since the system does not say which node a GPU is near"]
    for node in known:
        if not parse_cpus(cpus[node]) & {*allowed}:
            lines.append(
                f"ranks: NOT BOUND to node {node}: this process may use none of its CPUs {cpus[node]};"
                " let the container or taskset allow them"
            )
            return lines
    if len(known) == 1 and {*allowed} <= parse_cpus(cpus[known[0]]):
        return [*lines, f"ranks: bound to node {known[0]}, as this process is"]
    if environment.get(SWITCH, "").lower() in OFF:
        return [*lines, f"ranks: NOT BOUND, switched off by {SWITCH}={environment[SWITCH]}; unset it"]
    if has_numactl:
        return [*lines, "ranks: SGLang binds each to its GPU's node, by numactl"]
    return [*lines, f"ranks: NOT BOUND, numactl is not installed; {remedy(known, cpus)}"]


def remedy(near: Collection[int], cpus: Mapping[int, str]) -> str:
    """The command that binds ranks whose GPUs are on the nodes ``near``."""
    if len(near) > 1:
        return f"{INSTALL}, and SGLang binds each rank"
    (node,) = near
    return f"{INSTALL}, or start the server with: taskset -c {cpus[node]} python3 -m sglang.launch_server ..."
