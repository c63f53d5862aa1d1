"""Stores to global memory within a launch: what another cluster may read or overwrite of them.

A load must be ordered after the last store to each byte if that is another cluster's; so must a store, unless it writes
what is there. Between clusters releases and acquires of strong operations order, with fences for relaxed ones; within a
cluster the warps' clocks do (``ordering_clock``). So a barrier that is missing between a CTA's stores and the atomic
that counts it in is found, too. Lanes of a warp count as in order.

Tracked are ld and st, and what cp.async reads. Not tracked: stores after loads of other clusters, what TMA, bulk copies
and atomics access.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests.sm100.emulator.errors import HazardError
from tests.sm100.emulator.ordering_clock import AGENT_BITS, AGENT_MASK, NOTHING, ORDER, SITE_MASK

if TYPE_CHECKING:
    from tests.sm100.emulator.warp import Warp

Place = tuple[int, int, int]
"""A cluster, by where its block indices begin."""
Limits = dict[Place, np.ndarray]
"""By cluster: up to which epochs of its agents stores are known."""
PAGE_BITS = 14
PAGE = 1 << PAGE_BITS


def _merge(into: Limits, other: Limits) -> None:
    """Arrays are never changed in place, so that they may be shared."""
    for place, limits in other.items():
        known = into.get(place)
        if known is None:
            into[place] = limits
            continue
        short, merged = sorted((known, limits), key=len)
        merged = merged.copy()
        np.maximum(merged[: len(short)], short, out=merged[: len(short)])
        into[place] = merged


def _covers(limits: np.ndarray | None, epochs: np.ndarray) -> np.ndarray:
    """Which epochs are within the limits of their agents."""
    if limits is None:
        return np.zeros(epochs.shape, bool)
    agents = epochs & AGENT_MASK
    return (agents < len(limits)) & (limits[np.minimum(agents, len(limits) - 1)] >= epochs)


@dataclass
class _Page:
    """By byte: who stored it last, as a number of a cluster, 0 for nobody; and at which epoch of that cluster."""

    writers: np.ndarray = field(default_factory=lambda: np.zeros(PAGE, np.int32))
    epochs: np.ndarray = field(default_factory=lambda: np.zeros(PAGE, np.int64))


@dataclass
class _Sum:
    """What a warp knows of what its cluster has learnt.

    Attributes:
        limits: all of it that the warp comes after.
        seen: how much its cluster had learnt when that was last looked at.
        waiting: which of it the warp does not come after yet.
    """

    limits: Limits = field(default_factory=dict)
    seen: int = 0
    waiting: list[int] = field(default_factory=list)


@dataclass
class GlobalOrder:
    """The stores of a launch so far, and which clusters have been told of them."""

    _pages: dict[int, _Page] = field(default_factory=dict)
    _places: list[Place] = field(default_factory=list)
    """The cluster of each number, from 1 on."""
    _numbers: dict[Place, int] = field(default_factory=dict)
    _learnt: dict[Place, list[tuple[int, Limits]]] = field(default_factory=dict)
    """What a cluster's warps have acquired, each with the epoch from which on it is known."""
    _handed: dict[int, Limits] = field(default_factory=dict)
    """By word: what strong operations on it hand on."""
    _fenced: dict[tuple[Place, int], Limits] = field(default_factory=dict)
    """By warp: what it knew at its last fence, which its relaxed operations hand on."""
    _found: dict[tuple[Place, int], Limits] = field(default_factory=dict)
    """By warp: what its relaxed operations found, which its next fence acquires."""
    _sums: dict[tuple[Place, int], _Sum] = field(default_factory=dict)
    _versions: dict[int, int] = field(default_factory=dict)
    """By word: how often something was handed on."""
    _polled: dict[tuple[tuple[Place, int], int], int] = field(default_factory=dict)
    """By warp and word: of these what the warp has acquired."""

    def release(self, warp: Warp, word: int, relaxed: bool) -> None:
        """A strong store or atomic hands on what the warp knows."""
        told = self._fenced.get(_key(warp), {}) if relaxed else self._known(warp)
        _merge(self._handed.setdefault(word, {}), told)
        self._versions[word] = self._versions.get(word, 0) + 1

    def acquire(self, warp: Warp, word: int, relaxed: bool) -> None:
        """A strong load or atomic finds what was handed on."""
        found = self._handed.get(word)
        if not found:
            return
        if relaxed:
            _merge(self._found.setdefault(_key(warp), {}), found)
        elif self._polled.get((_key(warp), word)) != self._versions[word]:
            # A warp that polls learns nothing more until something is handed on again.
            self._polled[_key(warp), word] = self._versions[word]
            self._learn(warp, found)

    def fence(self, warp: Warp) -> None:
        """fence or membar with a scope beyond the CTA."""
        found = self._found.pop(_key(warp), None)
        if found:
            self._learn(warp, found)
        self._fenced[_key(warp)] = self._known(warp)

    def load(self, warp: Warp, addresses: np.ndarray, size: int) -> None:
        """Check a load of ``size`` bytes at each address.

        Raises:
            HazardError: another cluster stored some of it, which is not ordered before.
        """
        if self._pages:
            self._check(warp, _cells(addresses, size), "read")

    def store(self, warp: Warp, addresses: np.ndarray, data: np.ndarray, before: np.ndarray) -> None:
        """Check and record a store of u8 [n, size] over ``before``.

        Raises:
            HazardError: another cluster stored something else there, which is not ordered before.
        """
        cells = _cells(addresses, data.shape[1])
        self._check(warp, cells[(data != before).ravel()], "write")
        place, epoch = _place(warp), warp.actor.epoch()
        if place not in self._numbers:
            self._places.append(place)
            self._numbers[place] = len(self._places)
        number = self._numbers[place]
        for page, inside in _by_page(cells):
            known = self._pages.setdefault(page, _Page())
            known.writers[inside], known.epochs[inside] = number, epoch

    def _check(self, warp: Warp, cells: np.ndarray, what: str) -> None:
        own, known = _place(warp), None
        for number, inside in _by_page(cells):
            page = self._pages.get(number)
            if page is None:
                continue
            writers = page.writers[inside]
            others = writers[(writers > 0) & (writers != self._numbers.get(own, 0))]
            for writer in np.unique(others).tolist() if len(others) else ():
                place = self._places[writer - 1]
                known = self._known(warp) if known is None else known
                there = inside[writers == writer]
                unordered = ~_covers(known.get(place), page.epochs[there])
                if unordered.any():
                    epoch = int(page.epochs[there][np.argmax(unordered)])
                    instruction = warp.cta.launch.kernel.instructions[epoch >> AGENT_BITS & SITE_MASK]
                    address = number * PAGE + int(there[np.argmax(unordered)])
                    raise HazardError(
                        f"{what} of global memory at {address:#x} without being ordered after the write of the cluster "
                        f"at {place}\n  write by line {instruction.line}: {instruction.text}"
                    )

    def _learn(self, warp: Warp, found: Limits) -> None:
        known = self._known(warp)
        if any(not _covers(known.get(place), limits[limits > NOTHING]).all() for place, limits in found.items()):
            self._learnt.setdefault(_place(warp), []).append((warp.actor.epoch(), dict(found)))

    def _known(self, warp: Warp) -> Limits:
        """What a warp knows of each cluster: of its own by its clock, of others by what was learnt before."""
        own, place = warp.actor.clock.limits[ORDER], _place(warp)
        before, learnt = self._sums.setdefault(_key(warp), _Sum()), self._learnt.get(place, [])
        # A clock never goes back: what it once covered it covers for good.
        waiting = [*before.waiting, *range(before.seen, len(learnt))]
        before.seen, before.waiting = len(learnt), []
        for index in waiting:
            epoch, limits = learnt[index]
            if own[epoch & AGENT_MASK] >= epoch:
                _merge(before.limits, limits)
            else:
                before.waiting.append(index)
        known = dict(before.limits)
        _merge(known, {place: own.copy()})
        return known


def _place(warp: Warp) -> Place:
    return warp.cta.cluster.ctas[0].index


def _key(warp: Warp) -> tuple[Place, int]:
    return _place(warp), warp.actor.number


def _cells(addresses: np.ndarray, size: int) -> np.ndarray:
    """i64: the address of every byte."""
    return (addresses.astype(np.int64)[:, None] + np.arange(size)).ravel()


def _by_page(cells: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Each page's number, and where in it the cells are."""
    pages = cells >> PAGE_BITS
    if not len(cells):
        return []
    if not np.count_nonzero(pages != pages[0]):
        return [(int(pages[0]), cells & (PAGE - 1))]
    return [(page, cells[pages == page] & (PAGE - 1)) for page in np.unique(pages).tolist()]
