"""Compares a checkpoint directory with its configuration, by the files' headers alone.

:meth:`Inventory.open` trusts nothing: every file listed must be there and whole, every tensor must be where the index
says, once. :meth:`Inventory.verify` then demands exactly the tensors of :func:`names.tensor_specs`, each with the
shape and dtype of one of the storages that its role allows. Nothing is left out but draft layers, ``mtp.*``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from nvfp4_sgl.checkpoint.decoders import Part
from nvfp4_sgl.checkpoint.names import MTP_PREFIX, Role, TensorSpec, draft_block, tensor_specs
from nvfp4_sgl.checkpoint.safetensors_header import Entry, called, read_header
from nvfp4_sgl.checkpoint.storage import SUFFIXES, WEIGHT_DTYPES, Storage
from nvfp4_sgl.checkpoint.summary import CheckpointSummary
from nvfp4_sgl.checkpoint.transformers_names import MARKS, PREFIX, original_name
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.files import MAX_INDEX_BYTES, MAX_NAME, fetch_again, read_json, require_directory, shown

INDEX = "model.safetensors.index.json"
FETCH_INDEX = "fetch the index again"
"""What to do about a damaged one."""
PACKED = ("U8", "I8")
"""Dtypes of weights that hold two codes in a byte."""
SHOWN = 20
"""Problems listed in full; the rest are counted."""

DRAFT_BLOCK = re.compile(rf"{re.escape(MTP_PREFIX)}(\d{{1,3}})\.")
DSPARK_MARK = re.compile(r"\.(main_proj|markov_head|confidence_head)\.")
"""Tensors that DSpark's draft layers have and MTP's have not."""


class Inventory:
    """Tensors of a checkpoint directory by name, ``mtp.*`` included.

    Attributes:
        directory: where the files are.
        entries: every tensor, by DeepSeek's original name; an entry's own name is that in the file.
        config, summary: what :meth:`verify` was given and found; ``None`` before.
    """

    def __init__(self, directory: Path, entries: dict[str, Entry]):
        self.directory, self.entries = directory, entries
        self.config: ModelConfig | None = None
        self.summary: CheckpointSummary | None = None

    @classmethod
    def open(cls, directory: str | Path) -> Inventory:
        """Read all headers of the safetensors files in ``directory``, by the index if there is one.

        Raises:
            CheckpointError: a file is absent, damaged or not in the index; a tensor is in two files, in the index
                but not in its file or the other way round; or the names are of a layout that is not supported.
        """
        directory = require_directory(directory, CheckpointError)
        present = sorted(directory.glob("*.safetensors"))
        weight_map = _read_index(directory / INDEX) if os.path.lexists(directory / INDEX) else None
        if weight_map is not None:
            _check_files(directory, set(weight_map.values()), {file.name for file in present})
        if not present:
            raise CheckpointError(
                f"{directory}: holds no *.safetensors file; other weight formats are not read. For random weights, with"
                " no files, pass --load-format dummy"
            )
        entries: dict[str, Entry] = {}
        for file in present:
            for entry in read_header(file):
                if entry.name in entries:
                    raise CheckpointError(
                        f"tensor '{entry.name}' is in two files, {entries[entry.name].file} and {file};"
                        " remove the one that does not belong to this checkpoint"
                    )
                entries[entry.name] = entry
        if weight_map is not None:
            _check_index(directory / INDEX, weight_map, entries)
        return cls(directory, _original_names(directory, entries))

    def storage(self, stem: str) -> Storage:
        """Format of the matrix ``stem``; CheckpointError if no such matrix is there."""
        if self.summary is not None and stem in self.summary.storages:
            return self.summary.storages[stem]
        stored = self.stored(stem)
        if not stored:
            raise CheckpointError(f"{self.directory}: tensor '{stem}.weight' is missing; fetch the files again")
        return Storage.of(stored)

    def stored(self, stem: str) -> dict[str, str]:
        """Dtypes by suffix of what is stored under ``stem``."""
        found = ((suffix, self.entries.get(f"{stem}.{suffix}")) for suffix in SUFFIXES)
        return {suffix: entry.dtype for suffix, entry in found if entry is not None}

    def part_name(self, stem: str, part: Part) -> str:
        """Name of a part of the matrix ``stem``: of its alternatives the one that is there, else the usual one."""
        names = [f"{stem}.{suffix}" for suffix in part.suffixes]
        return next((name for name in names if name in self.entries), names[0])

    def verify(self, config: ModelConfig) -> CheckpointSummary:
        """Demand exactly the tensors of ``config``'s decoder; returns what they are stored as.

        Raises:
            CheckpointError: lists missing and superfluous tensors, wrong shapes and wrong dtypes, each with its
                file, what was expected and what was found.
        """
        layers, experts = config.num_hidden_layers, config.n_routed_experts
        if 3 * layers * experts > len(self.entries):
            raise CheckpointError(
                f"{self.directory}: the tensors do not match config.json, which asks for {layers} layers of {experts}"
                f" experts, {3 * layers * experts} matrices; the files hold {len(self.entries)} tensors: use the"
                " config.json that belongs to them"
            )
        audit = _Audit(self)
        summary = CheckpointSummary(self.directory)
        for spec in tensor_specs(config).values():
            storage, nbytes = audit.check(spec)
            summary.add(spec, storage, nbytes)
        drafts = []
        for name, entry in self.entries.items():
            if name.startswith(MTP_PREFIX):
                drafts.append(name)
                summary.skipped_bytes += entry.nbytes
            else:
                audit.expect_none_but_seen(name)
        audit.report()
        if drafts:
            summary.skipped = len(drafts)
            summary.draft = "DSpark draft" if any(map(DSPARK_MARK.search, drafts)) else "MTP draft"
        self.config, self.summary = config, summary
        return summary

    def verify_part(self, specs: Iterable[TensorSpec], names: Iterable[str]) -> dict[str, Storage]:
        """Demand ``specs``, and none of ``names`` besides; returns what each matrix is stored as.

        Raises:
            CheckpointError: as :meth:`verify`.
        """
        audit, storages = _Audit(self), dict[str, Storage]()
        for spec in specs:
            storage, _ = audit.check(spec)
            if storage is not None:
                storages[spec.name] = storage
        for name in names:
            audit.expect_none_but_seen(name)
        audit.report()
        return storages

    def draft_matrices(self, config: ModelConfig) -> dict[str, tuple[TensorSpec, Storage]]:
        """Matrices that the blocks of a draft, ``mtp.N``, share with decoder layers, and what each is stored as.

        What a draft has of its own (``e_proj`` and ``h_proj``, DSpark's projections and heads) is not among them.

        Raises:
            CheckpointError: lists wrong shapes and dtypes, as :meth:`verify` does.
        """
        blocks = {int(match[1]) for name in self.entries if (match := DRAFT_BLOCK.match(name))}
        specs = (spec for block in sorted(blocks) for spec in draft_block(config, block))
        audit, found = _Audit(self), {}
        for spec in specs:
            if spec.role.is_matrix and self.stored(spec.name):
                storage, _ = audit.check(spec)
                assert storage is not None, spec
                found[spec.name] = spec, storage
        audit.report()
        return found


def _read_index(file: Path) -> dict[str, str]:
    index = read_json(file, CheckpointError, MAX_INDEX_BYTES, FETCH_INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{file}: expected a non-empty object 'weight_map', found {type(weight_map).__name__}; {FETCH_INDEX}"
        )
    # Released checkpoints list 290 000 tensors in 95 files: each file name is looked at once.
    good: set[str] = set()
    for name, target in weight_map.items():
        if len(name) > MAX_NAME:
            raise CheckpointError(
                f"{file}: expected names of at most {MAX_NAME} characters, found {shown(name)}; {FETCH_INDEX}"
            )
        if isinstance(target, str) and target in good:
            continue
        is_name = isinstance(target, str) and len(target) <= MAX_NAME and Path(target).name == target
        if not is_name or not target.endswith(".safetensors"):
            raise CheckpointError(
                f"{file}: tensor '{name}': expected the name of a safetensors file, found {shown(target)};"
                f" {FETCH_INDEX}"
            )
        good.add(target)
    return weight_map


def _check_files(directory: Path, listed: set[str], present: set[str]) -> None:
    if absent := sorted(listed - present):
        raise CheckpointError(
            f"{directory}: {len(absent)} of {len(listed)} files listed in {INDEX} are absent: {_shorten(absent)};"
            f" {fetch_again(directory / INDEX, 'fetch them')}"
        )
    if stray := sorted(present - listed):
        raise CheckpointError(
            f"{directory}: files not listed in {INDEX}: {_shorten(stray)}; remove them or correct the index"
        )


def _check_index(index: Path, weight_map: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    problems = [
        f"tensor '{name}': expected in {target}, found "
        + (f"in {entries[name].file.name}" if name in entries else "nowhere")
        for name, target in weight_map.items()
        if name not in entries or entries[name].file.name != target
    ]
    problems += [
        f"tensor '{name}' in {entry.file.name}: not in the index"
        for name, entry in entries.items()
        if name not in weight_map
    ]
    if problems:
        raise CheckpointError(
            f"{index}: does not match the files, {len(problems)} problems; fetch index and files of one revision:"
            f"{_bullets(problems)}"
        )


def _original_names(directory: Path, entries: dict[str, Entry]) -> dict[str, Entry]:
    if any(MARKS.search(name) for name in entries):
        return _from_transformers(directory, entries)
    prefixed = sum(name.startswith(PREFIX) for name in entries)
    if prefixed not in (0, len(entries)):
        name = next(name for name in entries if name.startswith(PREFIX))
        raise CheckpointError(
            f"{directory}: {prefixed} of {len(entries)} tensors have the prefix '{PREFIX}' ('{name}' in"
            f" {entries[name].file.name}); expected all or none: rename the others"
        )
    if not prefixed:
        return entries
    return {name.removeprefix(PREFIX): entry for name, entry in entries.items()}


def _from_transformers(directory: Path, entries: dict[str, Entry]) -> dict[str, Entry]:
    renamed: dict[str, Entry] = {}
    for name, entry in entries.items():
        original = original_name(name)
        if original is None:
            raise CheckpointError(
                f"{directory}: some tensors have transformers' names, but '{name}' in {entry.file.name} has not."
                " Expected transformers' names with experts stored one by one"
                " ('model.layers.0.mlp.experts.0.gate_proj.weight'), or DeepSeek's ('layers.0.attn.wq_a.weight')"
            )
        if original in renamed:
            raise CheckpointError(
                f"tensor '{original}' is there twice, as '{name}' in {entry.file} and as '{renamed[original].name}' in"
                f" {renamed[original].file}; remove the one that does not belong to this checkpoint"
            )
        renamed[original] = entry
    return renamed


class _Audit:
    """Checks one spec after the other; gathers problems and the names that are accounted for."""

    def __init__(self, inventory: Inventory):
        self.inventory, self.entries = inventory, inventory.entries
        self.seen: set[str] = set()
        self.problems: list[str] = []

    def check(self, spec: TensorSpec) -> tuple[Storage | None, int]:
        """``(storage, bytes)`` of a logical tensor; no storage unless it is a matrix."""
        if spec.role.is_matrix:
            return self._matrix(spec)
        dtypes = {Role.PLAIN: ("BF16", "F32"), Role.FP32: ("F32",), Role.TID2EID: ("I64", "I32")}[spec.role]
        return None, self._tensor(spec.name, dtypes, [spec.shape])

    def _matrix(self, spec: TensorSpec) -> tuple[Storage, int]:
        stem, (n, k) = spec.name, spec.shape
        stored = self.inventory.stored(stem)
        if stored.get("weight") in PACKED and self.entries[f"{stem}.weight"].shape == spec.shape:
            del stored["weight"]  # whole numbers, not packed codes: the tensors beside them say what is expected
        storage = Storage.of(stored)
        weight = storage.decoder.parts[0]
        entry = self.entries.get(self.inventory.part_name(stem, weight))
        if entry is not None and entry.dtype not in weight.dtypes:
            return storage, self._other_weight(stem, storage, entry, weight.shapes(n, k)[0])
        if k % storage.decoder.column_multiple:
            self.problems.append(
                f"tensor '{stem}': {storage.value} needs a multiple of {storage.decoder.column_multiple} columns, the"
                f" model has {k}"
            )
        nbytes = 0
        for part in storage.decoder.parts:
            name = self.inventory.part_name(stem, part)
            if name in self.entries or not part.optional:
                nbytes += self._tensor(name, part.dtypes, part.shapes(n, k))
        return storage, nbytes

    def _other_weight(self, stem: str, storage: Storage, entry: Entry, shape: tuple[int, ...]) -> int:
        """Note a weight of a dtype that ``storage`` has not; what is stored beside it belongs to another format."""
        self.seen.update(f"{stem}.{suffix}" for suffix in SUFFIXES)
        weight = storage.decoder.parts[0]
        known = ", ".join(f"{' or '.join(dtypes)} ({scheme})" for scheme, dtypes in WEIGHT_DTYPES.items())
        self.problems.append(
            f"tensor {called(f'{stem}.{weight.suffixes[0]}', entry)} in {entry.file}: wrong dtype: expected"
            f" {' or '.join(weight.dtypes)} {list(shape)} ({storage.decoder.scheme or storage.value}), found"
            f" {_describe(entry)}; weights that are read are {known}: export the checkpoint in one of these formats"
        )
        return entry.nbytes

    def _tensor(self, name: str, dtypes: tuple[str, ...], shapes: list[tuple[int, ...]]) -> int:
        entry = self.entries.get(name)
        wanted = f"{' or '.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}"
        if entry is None:
            self.problems.append(f"tensor '{name}' is missing: expected {wanted}, found in no file")
            return 0
        self.seen.add(name)
        wrong = "dtype" if entry.dtype not in dtypes else "shape" if entry.shape not in shapes else ""
        if wrong:
            self.problems.append(
                f"tensor {called(name, entry)} in {entry.file}: wrong {wrong}: expected {wanted}, found"
                f" {_describe(entry)}"
            )
        return entry.nbytes

    def expect_none_but_seen(self, name: str) -> None:
        """Note a tensor that no spec accounts for."""
        if name not in self.seen:
            entry = self.entries[name]
            self.problems.append(
                f"tensor {called(name, entry)} in {entry.file}: no such tensor in this model or storage, expected"
                f" none, found {_describe(entry)}"
            )

    def report(self) -> None:
        if self.problems:
            raise CheckpointError(
                f"{self.inventory.directory}: the tensors do not match config.json, {len(self.problems)} problems:"
                f"{_bullets(self.problems)}"
            )


def _describe(entry: Entry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _bullets(problems: Iterable[str]) -> str:
    problems = list(problems)
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return "".join(f"\n  - {problem}" for problem in problems[:SHOWN] + more)
