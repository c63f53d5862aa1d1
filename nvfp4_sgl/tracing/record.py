"""Records what a server's passes compute, as JSON lines: of each boundary NaN, infinities, amax, a digest and a sketch.

The cost is bounded: a number of passes are recorded, then the taps are gone; a pass ends with one copy to the host;
sketch and digest read at most ``contents.SAMPLED_VALUES`` values of a boundary. Files hold no activations: two runs are
compared by their sketches (:mod:`.diff`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.tracing.contents import FORMAT, SAMPLED_VALUES, SKETCH
from nvfp4_sgl.tracing.taps import observing
from nvfp4_sgl.tracing.values import hashed, sign


class Recorder:
    """Writes the first ``passes`` passes of a decoder to ``file``.

    Args:
        about: what the first line says of the run: target, mode, rank.
    """

    def __init__(self, decoder: Decoder, file: Path, passes: int, about: dict[str, Any]) -> None:
        self._decoder, self._file, self._left, self._number = decoder, file, passes, 0
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"format": FORMAT, **about}) + "\n")

    @contextmanager
    def recording(self, token_ids: Tensor, positions: Tensor) -> Iterator[dict[str, Any]]:
        """Record the pass within, of these tokens, int [T]; nothing once enough passes were.

        Yields a dictionary for what more is to be told of the pass: ``chose``, the token that follows.
        """
        more: dict[str, Any] = {}
        if not self._left:
            yield more
            return
        names: list[str] = []
        shapes: list[tuple[int, ...]] = []
        rows: list[Tensor] = []
        digests: list[Tensor] = []

        def see(name: str, values: Tensor) -> None:
            names.append(name)
            shapes.append(tuple(values.shape))
            row, digest = summary(values)
            rows.append(row)
            digests.append(digest)

        with observing(self._decoder, see):
            yield more
        asked = torch.stack([_digest(token_ids.long()), _digest(positions.long())])
        figures, bits = torch.stack(rows).tolist(), torch.cat([torch.stack(digests), asked]).tolist()
        line = {
            "pass": self._number,
            "tokens": len(token_ids),
            "ids": token_ids.tolist(),
            "positions": positions.tolist(),
            **more,
            "input": [_hex(each) for each in bits[-2:]],
            "ops": [
                {"name": name, "shape": shape, "digest": _hex(digest), **_named(row)}
                for name, shape, digest, row in zip(names, shapes, bits[:-2], figures, strict=True)
            ],
        }
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._number += 1
        self._left -= 1


def summary(values: Tensor) -> tuple[Tensor, Tensor]:
    """(fp64 [4 + SKETCH]: NaN, infinities, amax, rms of the sample, sketch; int64 [], digest of the sample)."""
    rows = values.reshape(values.shape[0], -1)
    parts = rows.split(max(1, SAMPLED_VALUES // rows.shape[1]))  # a part at a time takes little room
    nan, infinite = (torch.stack([count(part).sum() for part in parts]).sum() for count in (torch.isnan, torch.isinf))
    amax = torch.stack([part.nan_to_num(0.0, 0.0, 0.0).abs().max() for part in parts]).max()
    sample = _sample(values)
    finite = sample.float().nan_to_num(0.0, 0.0, 0.0).flatten()
    bits = hashed(torch.arange(finite.numel(), device=values.device))
    # One column of signs at a time: all of them would take SKETCH times the room.
    sketch = torch.stack([(finite * sign(bits, column)).double().sum() for column in range(SKETCH)])
    head = torch.stack([nan.double(), infinite.double(), amax.double(), finite.double().square().mean().sqrt()])
    return torch.cat([head, sketch]), _digest(_bits(sample).flatten())


def _sample(values: Tensor) -> Tensor:
    rows = values.reshape(values.shape[0], -1)
    step = -(-rows.numel() // SAMPLED_VALUES)
    return rows[::step].contiguous()


def _bits(values: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(integers[values.element_size()]).long()


def _digest(integers: Tensor) -> Tensor:
    """int64 [] of int64 [N]: equal for equal numbers in equal places, on any device; wraps."""
    places = torch.arange(integers.numel(), device=integers.device)
    return ((integers + 1) * (2 * places + 1) * (places + 7919)).sum()


def _hex(digest: int) -> str:
    return f"{digest % 2**64:016x}"


def _named(row: Sequence[float]) -> dict[str, Any]:
    nan, infinite, amax, rms, *sketch = row
    return {"nan": int(nan), "inf": int(infinite), "amax": amax, "rms": rms, "sketch": sketch}
