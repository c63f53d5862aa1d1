"""Results of a run of ``launch/bench_full`` so far, in its output folder, so that a run that was cut off goes on.

``run.json`` has the conditions of the run, ``report.json`` what each measurement found, by server and name.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.full_size_plan import FAILED
from benchmarks.full_size_record import described

CONDITIONS = (
    "model", "tp", "layers", "prompt", "tokens", "flags", "sampling", "stock_sampler", "radix_cache",
    "drafts", "steps", "accepted",
)  # fmt: skip
"""Options that change what is measured. Others say how much is, which a run that goes on may change."""
OF_A_CALL = ("date", "source")
"""Fields that differ from call to call of a command; those of the first call are kept."""

Found = dict[str, dict[str, Any]]
"""What each measurement found, by server and name."""


@dataclass(frozen=True)
class Report:
    """The results of a run.

    Attributes:
        folder: where they are. run: what is recorded of all figures. found: of each server, by name.
    """

    folder: Path
    run: dict[str, Any]
    found: Found

    @classmethod
    def opened(cls, arguments: Namespace, command: list[str]) -> Report:
        """The report of ``arguments.output``, which goes on if it is of the same run; a new one with ``--fresh``.

        Raises:
            ValueError: it is of another run; names what differs.
        """
        folder: Path = arguments.output
        run = described(arguments, command)
        conditions = _conditions(arguments) | {name: value for name, value in run.items() if name not in OF_A_CALL}
        kept, file = _read(folder / "run.json"), folder / "report.json"
        found: Found = _read(file) or {}
        if found and not arguments.fresh:
            theirs = {} if kept is None else kept["conditions"]
            for name, value in conditions.items():
                if theirs.get(name) != value:
                    raise ValueError(
                        f"{file}: holds results of another run: {name}: expected {value!r}, found"
                        f" {theirs.get(name)!r}; name another --output, or pass --fresh to measure anew"
                    )
            assert kept is not None
            for values in found.values():
                values.pop(FAILED, None)
            print(f"== {file}: {sum(map(len, found.values()))} results are there, and are not measured again")
            return cls(folder, kept["run"], found)
        folder.mkdir(parents=True, exist_ok=True)
        report = cls(folder, run, {})
        report._write("report.json", report.found)
        report._write("run.json", {"conditions": conditions, "run": run})
        return report

    @staticmethod
    def wrote(arguments: Namespace, file: Path) -> bool:
        """Whether the run that ``arguments.output`` holds has written ``file``, so that it may write it again."""
        kept = _read(arguments.output / "run.json")
        try:
            return kept is not None and json.loads(file.read_text())["run"] == kept["run"] and not arguments.fresh
        except (ValueError, KeyError, TypeError):
            return False

    def add(self, engine: str, name: str, value: Any) -> None:
        """Keep a result, on the disk before anything else is measured."""
        self.found.setdefault(engine, {})[name] = value
        self._write("report.json", self.found)

    def _write(self, name: str, value: object) -> None:
        unfinished = self.folder / f"{name}.unfinished"
        unfinished.write_text(json.dumps(value, indent=1) + "\n")
        unfinished.replace(self.folder / name)


def _conditions(arguments: Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in CONDITIONS}


def _read(file: Path) -> Any:
    """Contents of a JSON file; ``None`` without one."""
    return json.loads(file.read_text()) if file.exists() else None
