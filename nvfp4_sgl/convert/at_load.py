"""Convert matrices to NVFP4 while they are loaded: ``nvfp4-sgl convert`` without a copy on the disk.

What is loaded equals, bit for bit, what the converted checkpoint would hold. Nothing is kept: every start converts
again, and each rank converts every matrix that it holds a part of as a whole, since a global scale depends on all of
its values (docs/convert.md, "Time and memory"). The arithmetic is done where the model is; it has run on CPUs only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.reader import CheckpointReader, bounds
from nvfp4_sgl.checkpoint.safetensors_header import Entry
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.convert.matrix import MatrixConverter
from nvfp4_sgl.convert.options import DRAFTS, Options
from nvfp4_sgl.convert.plan import Conversion, Copy, Invert, Quantise, Step, make_plan
from nvfp4_sgl.convert.tally import Tally
from nvfp4_sgl.convert.words import described
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.synthetic.dummy import DummyReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ConvertedAtLoad(Verified):
    """A checkpoint as its conversion would be; readers convert.

    Attributes:
        source: what is on the disk. plan, options: of the conversion.
    """

    source: Verified
    plan: Conversion
    options: Options

    def _opened(
        self,
        inventory: Inventory,
        device: torch.device | str,
        say: Callable[[str], None] | None = None,
        of_draft: bool = False,
    ) -> CheckpointReader:
        """A reader of the tensors, on the CPU; it computes on ``device``, a GPU or the CPU."""
        if torch.device(device).type == "meta":
            return DummyReader(inventory, device, of_draft=of_draft)
        return ConvertingReader(self, torch.device(device), say, of_draft=of_draft)

    def describe(self) -> str:
        """The source of the weights, in words."""
        return f"{self.summary.format} made at load of the {self.source.describe()}"


def converted_at_load(source: Verified, options: Options) -> ConvertedAtLoad:
    """``source`` with the matrices of ``options.classes`` in NVFP4; nothing is read yet.

    Raises:
        ConfigError: nothing is to be converted, or drafts are and there are none; or as :func:`.plan.make_plan`.
        CheckpointError: as :func:`.plan.make_plan`.
    """
    if options.drafts and not source.inventory.draft_matrices(source.config):
        raise ConfigError(
            f"{source.inventory.directory}: convert_at_load: '{DRAFTS}': expected a draft with matrices under"
            " DeepSeek's names (mtp.0.attn.wq_a, …), found none; leave the word out"
        )
    plan = make_plan(source, options)
    if plan.before == plan.after and not plan.drafts:
        raise ConfigError(
            f"{source.inventory.directory}: convert_at_load: expected a matrix that is not NVFP4 among"
            f" {', '.join(sorted(kind.value for kind in options.classes))}, found none; leave it out"
        )
    entries = {
        output.name: Entry(output.name, _file(source, step), output.dtype, output.shape, 0, output.nbytes)
        for shard in plan.shards
        for step in shard.steps
        for output in step.outputs
    }
    inventory = Inventory(source.inventory.directory, entries)
    summary = inventory.verify(source.config)
    raw = described(source.raw, plan.after, plan.draft_weights())
    return ConvertedAtLoad(raw, source.config, inventory, summary, source=source, plan=plan, options=options)


def _file(source: Verified, step: Step) -> Path:
    """The file that a step begins to read in, for errors."""
    if isinstance(step, Quantise):
        decoder = step.storage.decoder
        return source.inventory.entries[source.inventory.part_name(step.stem, decoder.parts[0])].file
    return source.inventory.entries[step.original].file


class ConvertingReader(CheckpointReader):
    """Reads the source of a :class:`ConvertedAtLoad` as if it had been converted; docstrings of the base apply.

    The parts of a matrix are asked for one after another: the last matrix is kept, and converted once for them.
    """

    def __init__(
        self,
        verified: ConvertedAtLoad,
        device: torch.device,
        say: Callable[[str], None] | None = None,
        *,
        of_draft: bool = False,
    ):
        super().__init__(verified.inventory, say=say, of_draft=of_draft)
        self._source = CheckpointReader(verified.source.inventory)
        self._converter = MatrixConverter(self._source, device, verified.options)
        self._steps: dict[str, tuple[Step, int]] = {
            output.name: (step, number)
            for shard in verified.plan.shards
            for step in shard.steps
            for number, output in enumerate(step.outputs)
        }
        self._last: tuple[str, tuple[Tensor, Tensor, Tensor]] | None = None
        self._tally, self._counted = Tally(), set[str]()

    def read_unchecked(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        entry = self._entry(name)
        step, number = self._steps[name]
        if isinstance(step, Copy):
            return self._source.read_unchecked(step.original, rows, cols)
        if isinstance(step, Invert):
            return self._source.read(step.original).reshape(()).reciprocal()
        part = self._converted(step)[number]
        for dim, extent in ((0, rows), (1, cols)):
            if extent is not None:
                start, stop = bounds(entry, name, dim, extent)
                part = part.narrow(dim, start, stop - start)
        return part.contiguous()

    def _converted(self, step: Quantise) -> tuple[Tensor, Tensor, Tensor]:
        if self._last is None or self._last[0] != step.stem:
            matrix, tally = self._converter.convert(step)
            if step.stem not in self._counted:
                self._counted.add(step.stem)
                self._tally.classes[step.kind].add(tally)
            self._last = step.stem, (matrix.packed, matrix.block_scale, matrix.global_scale)
        return self._last[1]

    def finish(self, elsewhere: Collection[str] = ()) -> None:
        """Finish as the base; then log the conversions and their errors."""
        super().finish(elsewhere)
        self._last = None
        self._source.release()
        for line in (*self._tally.table(), *self._tally.inexact()):
            logger.info("converted at load: %s", line)
