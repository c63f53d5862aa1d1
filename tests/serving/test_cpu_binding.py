"""Which ranks are restricted to cores of their own: those that compute on the CPU, and no others."""

from __future__ import annotations

import os

import pytest
import torch

from nvfp4_sgl.serving import arguments
from nvfp4_sgl.serving.arguments import CPU_BINDING


@pytest.fixture
def restricted(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """What processes were restricted to; this one never is."""
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: found.append(cpus))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 8})
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setenv(CPU_BINDING, "")  # so that what the code sets is taken away afterwards
    monkeypatch.delenv(CPU_BINDING)
    return found


def on(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "detect_target", lambda: target)


def test_ranks_on_the_cpu_share_its_cores(restricted: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    on("cpu", monkeypatch)
    arguments.bind_threads(1)
    arguments.use_bound_cpus(0)
    assert CPU_BINDING not in os.environ and not restricted
    arguments.bind_threads(2)
    for rank in range(2):
        arguments.use_bound_cpus(rank)
    assert restricted == [{0, 1}, {2, 3}]


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_ranks_on_gpus_are_left_alone(target: str, restricted: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the environment asks for the binding that SGLang's CPU kernels know."""
    on(target, monkeypatch)
    arguments.bind_threads(2)
    assert CPU_BINDING not in os.environ
    monkeypatch.setenv(CPU_BINDING, "0,1|2,3")
    arguments.use_bound_cpus(1)
    assert not restricted


def test_nothing_is_left_in_the_environment() -> None:
    assert CPU_BINDING not in os.environ
