"""Clusters of CTAs, TMA and dependent launches: cases that an H200 has run, with what NumPy expects."""

from __future__ import annotations

import numpy as np
import torch

from tests.sm100.hardware import cluster_cases, dependent_cases
from tests.sm100.hardware.case import Case
from tests.sm100.probe.probe import Probe

SWIZZLE_BYTES = 16
"""What the 128-byte swizzle moves as one."""


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Unsigned integers of the tensor's width."""
    return tensor.view(torch.uint8).numpy().view(f"u{tensor.element_size()}").reshape(tensor.shape)


def case_named(cases: list[Case], name: str) -> Case:
    (found,) = (case for case in cases if case.name == name)
    return found


def swizzled(box: np.ndarray) -> np.ndarray:
    """Rows of 128 bytes as TMA lays them: the 16-byte pieces of row r change places by r modulo 8."""
    rows = box.view(np.uint8).reshape(len(box), 8, SWIZZLE_BYTES)
    result = np.empty_like(rows)
    for row in range(len(rows)):
        for piece in range(8):
            result[row, piece ^ row % 8] = rows[row, piece]
    return result


def multicast() -> Probe:
    """Two clusters of two CTAs: each CTA loads a box at (40 x - 8, 6 y + 1) into both, zeros beyond the edge."""
    case = case_named(cluster_cases.cases(), "multicast in a cluster of 2")
    width, height = cluster_cases.BOX
    pitch, rows = 152, 40
    source = bits(case.inputs["source"]).reshape(rows, pitch)
    padded = np.pad(source, ((0, height), (width, width)))
    boxes = []
    for x in range(4):
        column = 40 * x - 8 + width
        boxes.append(swizzled(np.ascontiguousarray(padded[1 : 1 + height, column : column + width])).reshape(-1))
    words = np.stack(boxes).view(np.uint32)
    expected = np.stack([words[x // 2 * 2 : x // 2 * 2 + 2] for x in range(4)])
    return Probe(case, "a cluster of 2, cp.async.bulk.tensor with multicast, mbarriers", {"dump": expected})


def distributed_shared_memory() -> Probe:
    """Clusters of four: a CTA gives its value to CTA rank ^ 1 in each round, and reads the inbox of CTA rank + 2."""
    case = case_named(cluster_cases.cases(), "distributed shared memory")
    rounds, size, threads = cluster_cases.Exchange.ROUNDS, cluster_cases.Exchange.SIZE, cluster_cases.THREADS
    value = bits(case.inputs["source"]).copy()
    blocks = np.arange(len(value))
    partner, third = blocks ^ 1, blocks // size * size + (blocks + 2) % size
    inbox = np.empty((len(value), rounds, threads), np.uint32)
    for step in range(rounds):
        inbox[:, step] = value[partner]
        value = inbox[:, step] * np.uint32(3) + np.uint32(step)
    seen = inbox[third][:, :, np.arange(threads) ^ 5]
    given = value[third]
    gathered = np.stack((given, ~given, given, ~given), axis=1)
    shows = "mapa, st.shared::cluster, mbarrier.arrive at another CTA, fence.acq_rel.cluster"
    return Probe(case, shows, {"passed": value, "seen": seen, "gathered": gathered})


def dependent_launches() -> Probe:
    """Each link of the chain folds in what other blocks of the link before wrote."""
    case = case_named(dependent_cases.cases(), "dependent launches")
    source = bits(case.inputs["source"])
    links = [source]
    before = (np.arange(len(source)) * 5 + 77) % len(source)
    for _ in range(1, dependent_cases.LINKS):
        links.append(source * np.uint32(31) + links[-1][before])
    return Probe(case, "griddepcontrol.launch_dependents and wait", {"chain": np.stack(links)})


def probes() -> list[Probe]:
    return [multicast(), distributed_shared_memory(), dependent_launches()]
