"""What doctor says of NUMA nodes, on hosts that are folders made to look like /sys."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_sgl import doctor, numa

GPUS = {"cuda:0": "0000:1B:00.0", "cuda:1": "0000:9d:00.0"}
BOTH = {"cuda:0": 0, "cuda:1": 1}
CPUS = ("0-3,8-11", "4-7,12-15")
ALL = range(16)
INSTALL = "apt-get install numactl"


def host(folder: Path, cpus: tuple[str, ...] = CPUS, gpus: dict[str, int] | None = None) -> Path:
    """A host with nodes of these CPUs, and GPUs on these nodes."""
    for node, text in enumerate(cpus):
        place = folder / "devices/system/node" / f"node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(text + "\n")
    (folder / "devices/system/node/possible").write_text("0-1\n")
    for name, node in (BOTH if gpus is None else gpus).items():
        place = folder / "bus/pci/devices" / GPUS[name].lower()
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{node}\n")
    return folder


def described(sysfs: Path, **changes: Any) -> list[str]:
    fields: dict[str, Any] = {"allowed": ALL, "has_numactl": False, "environment": {}}
    return numa.describe(GPUS, sysfs=sysfs, **fields | changes)


def test_ranks_are_not_bound_without_numactl(tmp_path: Path) -> None:
    lines = described(host(tmp_path))
    assert lines[:-1] == ["node 0: CPUs 0-3,8-11", "node 1: CPUs 4-7,12-15", "cuda:0: node 0", "cuda:1: node 1"]
    assert lines[-1].startswith("ranks: NOT BOUND, numactl is not installed") and INSTALL in lines[-1]
    assert "taskset" not in lines[-1], "the ranks belong on different nodes"


def test_gpus_of_one_node(tmp_path: Path) -> None:
    """The command binds them; a process that is bound so needs nothing."""
    sysfs = host(tmp_path, gpus={"cuda:0": 1, "cuda:1": 1})
    assert "taskset -c 4-7,12-15 python3 -m sglang.launch_server" in described(sysfs)[-1]
    assert described(sysfs, allowed={4, 5, 12})[-1] == "ranks: bound to node 1, as this process is"


def test_sglang_binds_with_numactl(tmp_path: Path) -> None:
    sysfs = host(tmp_path)
    assert described(sysfs, has_numactl=True)[-1] == "ranks: SGLang binds each to its GPU's node, by numactl"
    for value in ("0", "False"):
        line = described(sysfs, has_numactl=True, environment={numa.SWITCH: value})[-1]
        assert line == f"ranks: NOT BOUND, switched off by SGLANG_AUTO_NUMA_BIND={value}; unset it"
    assert "SGLang binds" in described(sysfs, has_numactl=True, environment={numa.SWITCH: "1"})[-1]


def test_cpus_that_this_process_may_not_use(tmp_path: Path) -> None:
    line = described(host(tmp_path), allowed=range(4), has_numactl=True)[-1]
    assert line.startswith("ranks: NOT BOUND to node 1: this process may use none of its CPUs 4-7,12-15")


@pytest.mark.parametrize("gpus", [{"cuda:0": -1, "cuda:1": -1}, {}], ids=["the system does not know", "no files"])
def test_gpus_of_unknown_nodes(gpus: dict[str, int], tmp_path: Path) -> None:
    lines = described(host(tmp_path, gpus=gpus), has_numactl=True)
    assert "cuda:1: node unknown" in lines and lines[-1].startswith("ranks: not bound, since the system does not say")


def test_nothing_is_said_of_other_hosts(tmp_path: Path) -> None:
    """One node, no GPUs, or no such files; a node may have memory alone."""
    assert described(host(tmp_path / "one", ("0-15",), {"cuda:0": 0, "cuda:1": 0})) == []
    assert described(tmp_path / "none") == []
    assert numa.describe({}, allowed=ALL, has_numactl=True, environment={}, sysfs=host(tmp_path / "two")) == []
    lines = described(host(tmp_path / "memory", (*CPUS, "")), has_numactl=True)
    assert "node 2: CPUs none" in lines and "SGLang binds" in lines[-1]


def test_parse_cpus() -> None:
    assert numa.parse_cpus("0-2,5\n") == {0, 1, 2, 5} and numa.parse_cpus("") == set()


class Gpu:
    """What torch says of an H200."""

    name, major, minor, total_memory = "NVIDIA H200", 9, 0, 141 * 2**30
    pci_domain_id, pci_device_id = 0, 0

    def __init__(self, bus: int):
        self.pci_bus_id = bus


def test_doctor_tells_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no problem: a server would start."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Gpu((0x1B, 0x9D)[index]))
    monkeypatch.setattr(numa, "SYSFS", host(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda program: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(ALL))
    report = doctor.Report()
    doctor.examine_target(report, "sm_90a")
    assert "cuda:1: node 1" in report.numa and INSTALL in report.numa[-1] and not report.problems
    text = doctor.render(report)
    assert "\nNUMA\n  node 0: CPUs 0-3,8-11\n" in text and f"  {report.numa[-1]}\n" in text
    assert "NUMA" not in doctor.render(doctor.Report())
