"""The plan of a conversion: which tensors go to which file, decided from the source's headers alone.

A plan is a function of the source's headers and of the options, so that a conversion that was interrupted finds the
files that it wrote where it would write them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nvfp4_sgl.checkpoint.classes import MatrixClass
from nvfp4_sgl.checkpoint.decoders import Decoder, Part
from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.names import MTP_PREFIX, TensorSpec, tensor_specs
from nvfp4_sgl.checkpoint.safetensors_header import ITEM_BYTES, Entry
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.convert.options import Options, Scales
from nvfp4_sgl.errors import CheckpointError, ConfigError, Nvfp4SglError
from nvfp4_sgl.formats import nvfp4

QUANTISE_COST = {Scales.MAX: 20, Scales.MSE: 120}
"""Work of quantising an element on a CPU, in bytes that are copied meanwhile. It shapes the estimate of time alone."""


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor that is written; ``dtype`` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class _OneTensor:
    """Base of a step that writes one tensor."""

    output: WrittenTensor

    @property
    def outputs(self) -> tuple[WrittenTensor, ...]:
        return (self.output,)

    @property
    def cost(self) -> int:
        return self.output.nbytes


@dataclass(frozen=True)
class Copy(_OneTensor):
    """Write a tensor's bytes as they are.

    Attributes:
        original: its name in the inventory.
        is_checked: whether its values are checked first; those of a draft that is copied as it is are not.
    """

    entry: Entry
    original: str
    output: WrittenTensor
    is_checked: bool = True


@dataclass(frozen=True)
class Invert(_OneTensor):
    """Write the reciprocal of a scalar: compressed-tensors' global scales divide, ModelOpt's multiply."""

    original: str
    output: WrittenTensor


@dataclass(frozen=True)
class Quantise:
    """Write a matrix [N, K] as NVFP4: cast where that is exact, else quantised.

    Attributes:
        tied: the matrix that shares its global scale, if there is one.
        cost: bytes that could be copied in the time that this takes, roughly.
    """

    stem: str
    storage: Storage
    kind: MatrixClass
    shape: tuple[int, int]
    tied: str | None
    cost: int

    @property
    def outputs(self) -> tuple[WrittenTensor, WrittenTensor, WrittenTensor]:
        """Codes, block scales, global scale."""
        n, k = self.shape
        return (
            WrittenTensor(f"{self.stem}.weight", "U8", (n, k // 2)),
            WrittenTensor(f"{self.stem}.weight_scale", "F8_E4M3", (n, k // nvfp4.BLOCK)),
            WrittenTensor(f"{self.stem}.weight_scale_2", "F32", ()),
        )


Step = Copy | Invert | Quantise


@dataclass(frozen=True)
class Shard:
    """A file and what is written to it, in this order."""

    file: str
    steps: tuple[Step, ...]

    @property
    def outputs(self) -> list[WrittenTensor]:
        return [output for step in self.steps for output in step.outputs]

    @property
    def nbytes(self) -> int:
        """Bytes of the data, without the header."""
        return sum(output.nbytes for output in self.outputs)

    @property
    def cost(self) -> int:
        return sum(step.cost for step in self.steps)


@dataclass(frozen=True)
class Conversion:
    """A conversion.

    Attributes:
        shards: the files.
        before, after: storage of every matrix in the source and in the result.
        drafts: storages of the matrices of drafts that become NVFP4, before.
        draft_tensors, draft_bytes: tensors of drafts that are copied.
    """

    shards: tuple[Shard, ...]
    before: dict[str, Storage]
    after: dict[str, Storage]
    drafts: dict[str, Storage]
    draft_tensors: int
    draft_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def outputs(self) -> Iterator[WrittenTensor]:
        """Every tensor of the result."""
        return (output for shard in self.shards for output in shard.outputs)

    def draft_weights(self) -> dict[str, bool]:
        """Stems of the 2-D weights of drafts, and whether each is NVFP4 now."""
        outputs = [output for output in self.outputs if output.name.startswith(MTP_PREFIX)]
        nvfp4 = {output.name.removesuffix(".weight_scale_2") for output in outputs}
        stems = (o.name.removesuffix(".weight") for o in outputs if o.name.endswith(".weight") and len(o.shape) == 2)
        return {stem: stem in nvfp4 for stem in stems}


def make_plan(source: Verified, options: Options) -> Conversion:
    """Plan the conversion of ``source``.

    Raises:
        ConfigError: nothing would be NVFP4; or drafts should be, and there are none.
        CheckpointError: K of a matrix is no multiple of 16; or gate and up, which are to be tied, are stored
            differently; or a draft that is to be converted is not complete.
    """
    inventory, before = source.inventory, source.summary.storages
    after = {stem: _becomes(stem, storage, options) for stem, storage in before.items()}
    if Storage.NVFP4 not in after.values():
        raise ConfigError(
            f"{inventory.directory}: no matrix would be NVFP4: {', '.join(k.value for k in options.classes) or 'none'}"
            " would be, the others are kept; choose other classes with --only or --keep"
        )
    groups: list[list[Step]] = []
    for spec in tensor_specs(source.config).values():
        if not spec.role.is_matrix:
            groups.append([_copy(inventory, spec.key, spec.key)])
        elif before[spec.name] is after[spec.name]:
            groups.append(_kept(inventory, spec.name, before[spec.name]))
        elif before[spec.name] is Storage.NVFP4_COMPRESSED:
            groups.append(_renamed(inventory, spec.name))
        else:
            groups.append([_quantised(inventory, spec, before, options)])
    drafts = _drafts(source, options)
    storages = {stem: storage for stem, (_, storage) in drafts.items()}
    for stem, (spec, storage) in drafts.items():
        is_renamed = storage is Storage.NVFP4_COMPRESSED
        groups.append(_renamed(inventory, stem) if is_renamed else [_quantised(inventory, spec, storages, options)])
    parts = (_stored_parts(inventory, stem, storage.decoder) for stem, storage in storages.items())
    converted = {name for of_matrix in parts for _, name in of_matrix}
    copied = [name for name in inventory.entries if name.startswith(MTP_PREFIX) and name not in converted]
    checked = _checked_in_drafts(source, options)
    groups += [[_copy(inventory, name, name, is_checked=name in checked)] for name in copied]
    draft_bytes = sum(inventory.entries[name].nbytes for name in copied)
    return Conversion(_shards(groups, options.shard_size), before, after, storages, len(copied), draft_bytes)


def _drafts(source: Verified, options: Options) -> dict[str, tuple[TensorSpec, Storage]]:
    """Matrices of drafts that become NVFP4."""
    if not options.drafts:
        return {}
    found = source.inventory.draft_matrices(source.config)
    if not found:
        raise ConfigError(
            f"{source.inventory.directory}: --drafts nvfp4: there is no draft with matrices under DeepSeek's names"
            " (mtp.0.attn.wq_a, …); leave the flag out"
        )
    try:
        source.draft()
    except Nvfp4SglError as error:
        raise type(error)(f"--drafts nvfp4: {error}\nor leave the flag out: the draft is copied as it is") from error
    return {
        stem: (spec, storage)
        for stem, (spec, storage) in found.items()
        if storage is not Storage.NVFP4 and MatrixClass.of(stem) in options.classes
    }


def _checked_in_drafts(source: Verified, options: Options) -> set[str]:
    """Tensors beside the matrices of a draft that is converted: a server that drafts would refuse bad values."""
    draft = source.draft() if options.drafts else None
    return set() if draft is None else {spec.key for spec in draft.specs.values() if not spec.role.is_matrix}


def _becomes(stem: str, storage: Storage, options: Options) -> Storage:
    # compressed-tensors' NVFP4 cannot stay: one config.json does not describe its storage and ModelOpt's at once.
    is_chosen = MatrixClass.of(stem) in options.classes or storage is Storage.NVFP4_COMPRESSED
    return Storage.NVFP4 if is_chosen else storage


def _copy(inventory: Inventory, original: str, name: str, *, is_checked: bool = True) -> Copy:
    entry = inventory.entries[original]
    return Copy(entry, original, WrittenTensor(name, entry.dtype, entry.shape), is_checked)


def _stored_parts(inventory: Inventory, stem: str, decoder: Decoder) -> Iterator[tuple[Part, str]]:
    for part in decoder.parts:
        name = inventory.part_name(stem, part)
        if name in inventory.entries:
            yield part, name


def _kept(inventory: Inventory, stem: str, storage: Storage) -> list[Step]:
    """A matrix as it is stored, under DeepSeek's names (``scale`` where others write ``weight_scale_inv``)."""
    parts = _stored_parts(inventory, stem, storage.decoder)
    return [_copy(inventory, name, f"{stem}.{part.suffixes[0]}") for part, name in parts]


def _renamed(inventory: Inventory, stem: str) -> list[Step]:
    """compressed-tensors' NVFP4 under ModelOpt's names; codes and block scales are the same bytes."""
    steps: list[Step] = []
    names = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    theirs = Storage.NVFP4_COMPRESSED.decoder.parts
    ours = {part.suffixes[0]: name for part, name in zip(theirs, names, strict=True)}
    for part, name in _stored_parts(inventory, stem, Storage.NVFP4_COMPRESSED.decoder):
        target = f"{stem}.{ours[part.suffixes[0]]}"
        steps.append(
            Invert(name, WrittenTensor(target, "F32", ())) if part.unit is None else _copy(inventory, name, target)
        )
    return steps


def _quantised(inventory: Inventory, spec: TensorSpec, before: dict[str, Storage], options: Options) -> Quantise:
    stem, storage, (n, k) = spec.name, before[spec.name], spec.shape
    if k % nvfp4.BLOCK:
        raise CheckpointError(
            f"{inventory.directory}: tensor '{stem}.weight' has {k} columns, expected a multiple of {nvfp4.BLOCK} for"
            f" NVFP4; keep it as it is: --keep {MatrixClass.of(stem).value}"
        )
    cost = n * k // 2 if storage is Storage.MXFP4 else n * k * QUANTISE_COST[options.scales]
    tied = _other_of_gate_and_up(stem) if options.tie_gate_up else None
    if tied is not None and before.get(tied) is not storage:
        other = before[tied].value if tied in before else "absent"
        raise CheckpointError(
            f"{inventory.directory}: --tie-gate-up: '{stem}' is {storage.value}, '{tied}' is {other};"
            " expected both in one storage; leave the flag out"
        )
    return Quantise(stem, storage, MatrixClass.of(stem), (n, k), tied, cost)


def _other_of_gate_and_up(stem: str) -> str | None:
    owner, _, matrix = stem.rpartition(".")
    other = {"w1": "w3", "w3": "w1"}.get(matrix)
    return f"{owner}.{other}" if other else None


def _shards(groups: Sequence[list[Step]], limit: int) -> tuple[Shard, ...]:
    """Fill files in order; what belongs to one matrix stays in one file."""
    files: list[list[Step]] = [[]]
    filled = 0
    for group in groups:
        size = sum(output.nbytes for step in group for output in step.outputs)
        if files[-1] and filled + size > limit:
            files.append([])
            filled = 0
        files[-1] += group
        filled += size
    count = len(files)
    return tuple(
        Shard(f"model-{index:05d}-of-{count:05d}.safetensors", tuple(steps)) for index, steps in enumerate(files, 1)
    )
