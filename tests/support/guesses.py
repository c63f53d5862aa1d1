"""What a server's draft guesses, planted (``planted_faults``), and the answers that it must give all the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path


class Guesses:
    """The file by which a draft guesses while it is there.

    Args:
        folder: where it is, and the ``token`` behind which logits are not finite.
    """

    def __init__(self, folder: Path):
        self.folder, self.file, self.token = folder, folder / "guesses", folder / "token"

    def environment(self, faults: Path, nan: str) -> dict[str, str]:
        """Variables of a server with these guesses, and the planted fault ``nan``; ``faults`` is their folder."""
        return {
            "PYTHONPATH": str(faults),
            "PLANTED_FAULT": f"guesses, {nan}",
            "PLANTED_GUESSES": str(self.file),
            "PLANTED_NAN": str(self.token),
        }

    def write(self, sequences: Sequence[Sequence[int]], wrong: Iterable[int] = ()) -> None:
        """Guess as ``sequences`` go on, and ``wrong`` at these positions modulo 256."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({"sequences": [list(ids) for ids in sequences], "wrong": list(wrong)}))
        new.rename(self.file)

    def clear(self) -> None:
        """Guess what the draft computes."""
        self.file.unlink(missing_ok=True)
