"""Which tests share a pytest-xdist worker, and which of them begin first.

``tests/seconds.txt`` says how long heavy files take. To renew it, on a machine that does nothing else::

    launch/test --junitxml=times.xml tests
    python -m tests.support.schedule times.xml > tests/seconds.txt
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests/seconds.txt"
LEAST_SECONDS = 10
"""What a file takes at least that the table holds."""

DEFAULT_SERVER = frozenset(
    f"tests/serving/test_{name}.py"
    for name in (
        *("aborts", "api_chat", "api_completions", "bad_requests", "endpoints", "ends_of_answers"),
        *("examples", "ask_it_page", "fields_served", "generated_requests", "logprobs", "server_info"),
    )
)
"""Files that talk to the same server, started with default flags."""

WATCHED_SERVER = frozenset(f"tests/serving/test_{name}.py" for name in ("metrics", "nan_logits"))
"""Files that talk to the same server, with metrics and a fault that can be armed."""

OWN_SERVERS = frozenset(
    f"tests/serving/test_{name}.py" for name in ("dummy_weights", "logprobs_variants", "process_failures")
)
"""Files of which every test starts a server of its own."""

INDEPENDENT = "tests/triton/"
"""A folder whose tests share nothing but what is compiled for one function: a file may take minutes to interpret."""


def file_of(nodeid: str) -> str:
    """The file of a test, from the repository's root."""
    return nodeid.split("::", 1)[0]


def scope_of(nodeid: str) -> str:
    """What a test shares a worker with: its file, the files of its server, or less."""
    file = file_of(nodeid)
    if file in OWN_SERVERS:
        return nodeid
    if file.startswith(INDEPENDENT):
        return nodeid.split("[", 1)[0]
    if file in WATCHED_SERVER:
        return "watched server"
    return "default server" if file in DEFAULT_SERVER else file


def read_table(lines: Iterable[str]) -> dict[str, float]:
    """Seconds by file, from lines ``seconds file``."""
    pairs = (line.split() for line in lines)
    return {file: float(seconds) for seconds, file in pairs}


class HeaviestFirst(LoadScopeScheduling):
    """Keeps a scope's tests on one worker; a free worker takes the scope that takes longest of those that are left.

    So no long file begins when the other workers have nothing left. Tests of files that the table lacks count nothing,
    and come last, scopes of many tests first.

    pytest-xdist's own groups (``--dist loadgroup``) have no effect with this pytest: 3.8.0 marks a test's group in
    its node id, which pytest 9.2 no longer takes from there.
    """

    seconds: dict[str, float] | None = None
    """By file; the table's unless given."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        self.workqueue.move_to_end(max(self.workqueue, key=self._weight), last=False)
        super()._assign_work_unit(node)

    def _weight(self, scope: str) -> float:
        """Seconds of a scope: of each file as much as it holds of its tests."""
        if self.seconds is None:
            self.seconds = read_table(TABLE.read_text().splitlines())
        held = Counter(map(file_of, self.workqueue[scope]))
        return sum(
            self.seconds[file] * count / self._tests[file] for file, count in held.items() if file in self.seconds
        )

    @property
    def _tests(self) -> Counter[str]:
        """How many tests of each file were collected."""
        if not hasattr(self, "_counted"):
            self._counted = Counter(map(file_of, self.collection or ()))
        return self._counted


def table_of(reports: Iterable[Path]) -> str:
    """The table from reports of ``--junitxml``.

    Raises:
        FileNotFoundError: a test's file is not below this repository's root.
    """
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            seconds[_file_of_class(case.attrib["classname"])] += float(case.attrib["time"])
    heavy = [(round(time), file) for file, time in seconds.items() if time >= LEAST_SECONDS]
    return "".join(f"{time:6} {file}\n" for time, file in sorted(heavy, key=lambda row: (-row[0], row[1])))


def _file_of_class(name: str) -> str:
    """The file of ``tests.folder.test_file``, or of a class there."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        file = "/".join(parts[:end]) + ".py"
        if (ROOT / file).is_file():
            return file
    raise FileNotFoundError(
        f"{name}: expected a module of tests below {ROOT}; run this in the checkout that was tested"
    )


if __name__ == "__main__":
    sys.stdout.write(table_of(map(Path, sys.argv[1:])))
