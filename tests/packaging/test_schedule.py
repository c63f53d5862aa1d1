"""The order in which pytest-xdist's workers take tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import schedule
from tests.support.schedule import ROOT, TABLE, HeaviestFirst, read_table, table_of

OWN, DEFAULT = "tests/serving/test_process_failures.py", "tests/serving/test_aborts.py"


class Worker:
    """Stands in for one of pytest-xdist's: notes the tests that it is given."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self.shutting_down = False
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture
def order(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The order in which one worker runs tests, by the seconds of their files."""
    monkeypatch.setattr(pytestconfig.option, "tx", ["popen"])
    monkeypatch.setattr(pytestconfig.option, "loadscopereorder", True, raising=False)

    def of(tests: list[str], seconds: dict[str, float]) -> list[str]:
        scheduler, worker = HeaviestFirst(pytestconfig), Worker()
        scheduler.seconds = seconds
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, tests)
        scheduler.schedule()
        done = 0
        while done < len(worker.given):
            scheduler.mark_test_complete(worker, worker.given[done])
            done += 1
        return [tests[index] for index in worker.given]

    return of


def test_longest_file_first_and_unknown_files_by_their_tests(order: Any) -> None:
    tests = ["a.py::x", "b.py::x", "b.py::y", "c.py::x", "d.py::x", "d.py::y", "d.py::z"]
    found = order(tests, {"a.py": 20.0, "c.py": 300.0})
    assert found == ["c.py::x", "a.py::x", "d.py::x", "d.py::y", "d.py::z", "b.py::x", "b.py::y"]


def test_a_scope_counts_its_part_of_a_file_and_all_files_of_a_server(order: Any) -> None:
    tests = [f"{OWN}::x", f"{OWN}::y", "a.py::x", f"{DEFAULT}::x", "tests/serving/test_examples.py::x"]
    found = order(tests, {OWN: 100.0, "a.py": 60.0, DEFAULT: 30.0, "tests/serving/test_examples.py": 40.0})
    # The default server's files take 70 s, each test of the file with servers of its own 50 s.
    assert found == [tests[3], tests[4], tests[2], tests[0], tests[1]]


def test_the_table_names_files_that_are_there() -> None:
    seconds = read_table(TABLE.read_text().splitlines())
    assert len(seconds) > 20 and min(seconds.values()) >= schedule.LEAST_SECONDS
    assert [file for file in seconds if not (ROOT / file).is_file()] == []


def test_the_table_is_renewed_from_reports(tmp_path: Path) -> None:
    report = tmp_path / "times.xml"
    cases = [("tests.packaging.test_schedule", 6.0), ("tests.packaging.test_schedule.Worker", 5.0)]
    cases += [("tests.packaging.test_site", 12.4), ("tests.packaging.test_sizes", 1.0)]
    body = "".join(f'<testcase classname="{name}" name="test_x" time="{time}" />' for name, time in cases)
    report.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    assert read_table(table_of([report]).splitlines()) == {
        "tests/packaging/test_site.py": 12, "tests/packaging/test_schedule.py": 11
    }  # fmt: skip
    report.write_text('<testsuites><testcase classname="elsewhere.test_it" name="test_x" time="9" /></testsuites>')
    with pytest.raises(FileNotFoundError, match=r"elsewhere\.test_it: expected a module of tests below"):
        table_of([report])
