"""What the tensors of a verified checkpoint are stored as."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from nvfp4_sgl.checkpoint.names import Role, Storage, TensorSpec


class CheckpointSummary:
    """Storage of every matrix, and counts by role.

    Attributes:
        directory: the checkpoint.
        storages: storage by stem, for all matrices.
        skipped, skipped_bytes: tensors ``mtp.*`` and their size.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.storages: dict[str, Storage] = {}
        self.skipped = 0
        self.skipped_bytes = 0
        self._counts: Counter[tuple[Role, Storage | None]] = Counter()
        self._bytes: Counter[tuple[Role, Storage | None]] = Counter()

    def add(self, spec: TensorSpec, storage: Storage | None, nbytes: int) -> None:
        """Record one logical tensor and the bytes of everything that is stored for it."""
        if storage is not None:
            self.storages[spec.name] = storage
        self._counts[spec.role, storage] += 1
        self._bytes[spec.role, storage] += nbytes

    def count(self, role: Role, storage: Storage | None = None) -> int:
        """Logical tensors of ``role``; of matrices, those in ``storage``, or all if ``None``."""
        return sum(n for (r, s), n in self._counts.items() if r is role and (storage is None or s is storage))

    @property
    def nbytes(self) -> int:
        """Bytes of the decoder's tensors."""
        return sum(self._bytes.values())

    @property
    def format(self) -> str:
        """``nvfp4-full``, ``nvfp4-experts``, ``fp8``, ``bf16`` (no quantised matrix) or ``mixed``."""
        experts = {s for (role, s) in self._counts if role is Role.EXPERT_LINEAR}
        linears = {s for (role, s) in self._counts if role is Role.LINEAR}
        if experts == {Storage.NVFP4}:
            if linears == {Storage.NVFP4}:
                return "nvfp4-full"
            return "mixed" if Storage.NVFP4 in linears else "nvfp4-experts"
        if experts | linears == {Storage.PLAIN}:
            return "bf16"
        if experts == {Storage.FP8} and Storage.NVFP4 not in linears:
            return "fp8"
        return "mixed"

    def table(self) -> str:
        """The counts as lines of text."""
        rows = [("role", "storage", "tensors", "MB")]
        for role in Role:
            for storage in (*Storage, None):
                if count := self._counts[role, storage]:
                    stored = storage.value if storage else "-"
                    rows.append((role.value, stored, str(count), f"{self._bytes[role, storage] / 1e6:.2f}"))
        if self.skipped:
            rows.append(("mtp.* (skipped)", "-", str(self.skipped), f"{self.skipped_bytes / 1e6:.2f}"))
        rows.append(("decoder", self.format, str(sum(self._counts.values())), f"{self.nbytes / 1e6:.2f}"))
        return "\n".join(f"{role:<17}{storage:<15}{count:>9}{size:>12}" for role, storage, count, size in rows)
