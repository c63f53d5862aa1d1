"""Numbers of clusters of CTAs that a GPU runs at a time. A cluster never spans GPCs, and these have uneven sizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Clusters(NamedTuple):
    """The number of clusters of each size that run at a time, with one multiprocessor (SM) a CTA.

    SM100's kernels take an SM a CTA, so this depends on the GPU and the size alone. A persistent kernel with more
    clusters takes twice as long: the rest begin when the others have ended. An H200 runs 39 clusters of three and 30 of
    four.
    """

    of_one: int
    of_two: int
    of_three: int
    of_four: int
    of_eight: int

    def of(self, size: int) -> int:
        """Clusters of 1, 2, 3, 4 or 8 CTAs."""
        return self[SIZES.index(size)]

    @property
    def multiprocessors(self) -> int:
        """SMs: clusters of one CTA."""
        return self.of_one

    @classmethod
    def in_gpcs(cls, multiprocessors: Iterable[int]) -> Clusters:
        """Clusters that GPCs with these numbers of SMs run, if a cluster may take any SMs of its GPC.

        A cluster of three may not: an H200's driver reports 39 where this gives 43. SM100's kernels have no clusters of
        three."""
        gpcs = tuple(multiprocessors)
        return cls(*(sum(count // size for count in gpcs) for size in SIZES))


SIZES = (1, 2, 3, 4, 8)
"""CTAs of a cluster, up to what every GPU runs."""
B200_GPCS = (20, 18, 18, 18) * 2
"""SMs of a B200's GPCs: an assumption. Each of its two dies has 80 SMs in four GPCs, of which 74 are switched on; among
the ways to spread 74 over GPCs of 16 to 20 this one has the fewest clusters of four. Chips differ: ask the driver."""
B200_CLUSTERS = Clusters.in_gpcs(B200_GPCS)
