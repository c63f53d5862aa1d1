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
from nvfp4_sgl import pushed_sums
from nvfp4_sgl.prompt_sizes import SWITCH, asked

CONDITIONS = (
    "model", "tp", "layers", "prompt", "tokens", "flags", "sampling", "stock_sampler", "radix_cache",
    "drafts", "draft_weights", "steps", "accepted",
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
            ValueError: it is of another run, cut or not to be written; names what differs.
        """
        folder: Path = arguments.output
        run = described(arguments, command)
        conditions = _conditions(arguments) | {name: value for name, value in run.items() if name not in OF_A_CALL}
        file = folder / "report.json"
        kept, found = ({}, {}) if arguments.fresh else (_read(folder / "run.json"), _read(file))
        if found:
            theirs = kept.get("conditions", {})
            for name, value in conditions.items():
                if theirs.get(name) != value:
                    raise ValueError(
                        f"{file}: holds results of another run: {name}: expected {value!r}, found"
                        f" {theirs.get(name)!r}; name another --output, or pass --fresh to measure anew"
                    )
            for values in found.values():
                values.pop(FAILED, None)
            print(f"== {file}: {sum(map(len, found.values()))} results are there, and are not measured again")
            run = kept["run"]
        report = cls(folder, run, found)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            report._write("report.json", found)
            report._write("run.json", {"conditions": conditions, "run": run})
        except OSError as error:
            raise ValueError(f"--output {folder}: expected to write there, found {error}; name another") from error
        return report

    @staticmethod
    def wrote(arguments: Namespace, file: Path) -> bool:
        """Whether the run that ``arguments.output`` holds has written ``file``, so that it may write it again."""
        if arguments.fresh:
            return False
        kept = _read(arguments.output / "run.json")
        try:
            return bool(kept) and json.loads(file.read_text())["run"] == kept["run"]
        except (OSError, ValueError, KeyError, TypeError):
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
    """Conditions that a run shares when it goes on: options, and the switch of prompts that its servers have."""
    switches = {SWITCH: asked(), pushed_sums.SWITCH: pushed_sums.asked()}
    return {name: getattr(arguments, name) for name in CONDITIONS} | switches


def _read(file: Path) -> dict[str, Any]:
    """Contents of a file of results; empty without one.

    Raises:
        ValueError: it holds no JSON object of objects.
    """
    try:
        found = json.loads(file.read_text()) if file.exists() else {}
    except ValueError as error:
        raise _cut(file, str(error)) from error
    if not isinstance(found, dict) or not all(isinstance(value, dict) for value in found.values()):
        raise _cut(file, "something else")
    return found


def _cut(file: Path, found: str) -> ValueError:
    return ValueError(
        f"{file}: expected a JSON object of objects, found {found}; name another --output, or pass --fresh to measure"
        " anew"
    )
