"""A probe: a case of ``tests.sm100.hardware`` and what NumPy expects of its outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.sm100.hardware.case import Case
from tests.support.departure import Departure


@dataclass(frozen=True)
class Probe:
    """A kernel of a few instructions.

    Attributes:
        case: what runs.
        shows: the instructions that it stands for, in words.
        expected: by output, as integers of its width or as fp32: exactly. Outputs that are not named are not compared.
        labels: names for the rows of an output, by output.
    """

    case: Case
    shows: str
    expected: Mapping[str, np.ndarray]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.case.name

    def compare(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Compare what a machine gave.

        Raises:
            Departure: names the first element that differs.
        """
        for departure in self.departures(outputs):
            raise departure

    def departures(self, outputs: Mapping[str, torch.Tensor]) -> Iterator[Departure]:
        """The first differing element of each output that has one."""
        for name, expected in self.expected.items():
            found = outputs[name].cpu().contiguous().view(torch.uint8).numpy().view(expected.dtype)
            found = found.reshape(expected.shape)
            wrong = found != expected
            if not wrong.any():
                continue
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            labels = self.labels.get(name)
            where = f"{labels[place[0]]}, element {place[1:]}" if labels else f"element {place}"
            yield Departure(
                f"{name}, {where}",
                expected=_shown(expected[place]),
                found=_shown(found[place]),
                detail=f"{int(wrong.sum())} of {wrong.size} elements differ; {self.shows}",
            )


def _shown(value: np.generic) -> str:
    return f"{value!s}" if value.dtype.kind == "f" else f"{int(value):#x}"
