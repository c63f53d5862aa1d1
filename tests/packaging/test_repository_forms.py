"""What the hosting service reads: workflows call scripts that are here, forms are well-formed, the citation is true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvfp4_sgl import __version__
from tests.packaging.checkout import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(file for file in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml")
FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def runs(workflow: dict[str, Any]) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def test_the_workflows_run_everything() -> None:
    commands = "\n".join(run for file in WORKFLOWS for run in runs(yaml.safe_load(file.read_text(encoding="utf-8"))))
    for expected in (".ci/run", "launch/docs", "bin/ruff", "-m mypy", "test_distribution.py", 'bin/uv" build'):
        assert expected in commands, expected


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_calls_what_is_here(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}, "a pull request of anybody runs it"
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] and job["runs-on"]
    for path in re.findall(r"(?:\.ci|launch|tests)/[\w./-]+", "\n".join(runs(workflow))):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.name)
def test_a_form_is_one(file: Path) -> None:
    form = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert form["name"] and form["description"]
    assert {field["type"] for field in form["body"]} <= FIELDS
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(set(ids)) == len(ids) > 0
    for field in form["body"]:
        assert field["attributes"].get("label" if field["type"] != "markdown" else "value")
    for path in re.findall(r"docs/\w+\.md|launch/\w+", file.read_text(encoding="utf-8")):
        assert (ROOT / path).is_file(), path


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software" and citation["message"]
    assert citation["version"] == __version__ and citation["license"] == project["license"]
    assert [one["name"] for one in citation["authors"]] == [one["name"] for one in project["authors"]]
    assert citation["keywords"] == project["keywords"]
