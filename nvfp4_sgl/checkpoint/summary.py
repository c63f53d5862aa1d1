"""Storages of the tensors of a verified checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from nvfp4_sgl.checkpoint.names import Role, TensorSpec
from nvfp4_sgl.checkpoint.storage import Storage


class CheckpointSummary:
    """Storage of every matrix, and counts by role.

    Attributes:
        directory: the checkpoint.
        storages: storage by stem, for all matrices; ``specs``: what each matrix is.
        skipped, skipped_bytes: tensors of draft layers, ``mtp.*``, and their size; ``draft``: what kind they are.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.storages: dict[str, Storage] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.skipped = 0
        self.skipped_bytes = 0
        self.draft = ""
        self._counts: Counter[tuple[Role, Storage | None]] = Counter()
        self._bytes: Counter[tuple[Role, Storage | None]] = Counter()

    def add(self, spec: TensorSpec, storage: Storage | None, nbytes: int) -> None:
        """Record one logical tensor and the bytes of everything that is stored for it."""
        if storage is not None:
            self.storages[spec.name], self.specs[spec.name] = storage, spec
        self._counts[spec.role, storage] += 1
        self._bytes[spec.role, storage] += nbytes

    def count(self, role: Role, storage: Storage | None = None) -> int:
        """Logical tensors of ``role``; of matrices, those in ``storage``, or all if ``None``."""
        return sum(n for (r, s), n in self._counts.items() if r is role and (storage is None or s is storage))

    def nbytes_of(self, role: Role) -> int:
        """Bytes of all tensors of ``role``."""
        return sum(n for (r, _), n in self._bytes.items() if r is role)

    def other_roles(self) -> list[Role]:
        """Roles that are no matrices, of which there are tensors."""
        return [role for role in Role if not role.is_matrix and self.count(role)]

    @property
    def nbytes(self) -> int:
        """Bytes of the decoder's tensors."""
        return sum(self._bytes.values())

    @property
    def format(self) -> str:
        """The format in one word: ``nvfp4-full``, ``nvfp4-experts``, ``mxfp4-experts``, ``fp8``, ``bf16`` or ``mixed``.

        ``nvfp4-…`` is said of every storage of NVFP4, ``bf16`` where no matrix is quantised.
        """
        experts = {storage.decoder.scheme for (role, storage) in self._counts if role is Role.EXPERT_LINEAR and storage}
        linears = {storage.decoder.scheme for (role, storage) in self._counts if role is Role.LINEAR and storage}
        if len(experts) > 1 or ("NVFP4" in linears and experts | linears != {"NVFP4"}):
            return "mixed"
        if experts == {"NVFP4"}:
            return "nvfp4-full" if linears == {"NVFP4"} else "nvfp4-experts"
        if experts == {"MXFP4"}:
            return "mxfp4-experts"
        if experts == {"FP8"}:
            return "fp8"
        return "bf16" if not any(experts | linears) else "mixed"

    def table(self) -> str:
        """The counts as lines of text."""
        rows = [("role", "storage", "tensors", "MB")]
        for role in Role:
            for storage in (*Storage, None):
                if count := self._counts[role, storage]:
                    stored = storage.value if storage else "-"
                    rows.append((role.value, stored, str(count), f"{self._bytes[role, storage] / 1e6:.2f}"))
        if self.skipped:
            rows.append(("draft, mtp.*", self.draft, str(self.skipped), f"{self.skipped_bytes / 1e6:.2f}"))
        rows.append(("decoder", self.format, str(sum(self._counts.values())), f"{self.nbytes / 1e6:.2f}"))
        return "\n".join(f"{role:<17}{storage:<26}{count:>9}{size:>12}" for role, storage, count, size in rows)
