"""What ``launch/release`` refuses: each fault of version, changelog, tag, addresses and checkout is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))

from programs import release

PROJECT = """
[project]
name = "nvfp4-sgl"

[project.urls]
Changelog = "https://example.org/changelog"
Documentation = "https://example.org/documentation"
Source = "https://example.org/source"
"""
CHANGELOG = """
# Changelog

## [Unreleased]

## [0.2.0] - 2026-11-27

* A change.
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that may be released as 0.2.0."""
    (tmp_path / "nvfp4_sgl").mkdir()
    (tmp_path / "nvfp4_sgl" / "__init__.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.2.0\n")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    commit(tmp_path)
    subprocess.run(["git", "tag", "v0.2.0"], cwd=tmp_path, check=True)
    return tmp_path


def commit(checkout: Path) -> None:
    subprocess.run(["git", "add", "--all"], cwd=checkout, check=True)
    author = ["-c", "user.name=author", "-c", "user.email=author@example.org"]
    subprocess.run(["git", *author, "commit", "--quiet", "--message", "State"], cwd=checkout, check=True)


def test_a_checkout_with_one_version_everywhere_is_ready(checkout: Path) -> None:
    assert release.faults(checkout) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("CHANGELOG.md", "[0.2.0]", "[0.1.9]", "second section: expected [0.2.0]"),
        ("CHANGELOG.md", " - 2026-11-27", "", "expected [0.2.0] - YYYY-MM-DD"),
        ("CHANGELOG.md", "## [Unreleased]\n", "## [Unreleased]\n\n* Another change.\n", "expected an empty section"),
        ("pyproject.toml", "Documentation", "Documents", "[project.urls] Documentation: missing"),
        ("CITATION.cff", "version: 0.2.0", "version: 0.1.9", "CITATION.cff: version: expected 0.2.0"),
        ("nvfp4_sgl/__init__.py", "0.2.0", "0.3.0", "no tag v0.3.0"),
    ],
)
def test_a_fault_is_named(file: str, old: str, new: str, expected: str, checkout: Path) -> None:
    text = (checkout / file).read_text()
    assert old in text
    (checkout / file).write_text(text.replace(old, new))
    found = release.faults(checkout)
    assert any(expected in fault for fault in found), found
    assert any("files differ from the last commit" in fault and file in fault for fault in found)


def test_the_tag_must_be_at_the_last_commit(checkout: Path) -> None:
    (checkout / "README.md").write_text("More.\n")
    commit(checkout)
    assert release.faults(checkout) == [
        "git: the last commit has no tag v0.2.0; run: git tag --annotate v0.2.0",
    ]


def test_a_folder_without_a_commit_is_a_fault(checkout: Path) -> None:
    shutil.rmtree(checkout / ".git")
    (fault,) = release.faults(checkout)
    assert "git: expected a repository with a commit" in fault


def test_a_version_of_another_form_is_refused(checkout: Path) -> None:
    (checkout / "nvfp4_sgl" / "__init__.py").write_text('__version__ = "0.2.0.dev1"\n')
    with pytest.raises(ValueError, match=r"__version__: expected X.Y.Z, found '0.2.0.dev1'"):
        release.version_of(checkout)
