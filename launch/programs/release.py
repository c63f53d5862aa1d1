"""Checks of ``launch/release``: one version everywhere, and archives that install beside SGLang."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = ("Changelog", "Documentation", "Source")
"""Names of the project's own pages that ``[project.urls]`` must hold, as package indexes label them."""
PROBE = """
import sys
from importlib.metadata import entry_points, requires, version
from packaging.requirements import Requirement
import nvfp4_sgl.cutedsl_kernels, nvfp4_sgl.triton_kernels
for needed in map(Requirement, requires("nvfp4-sgl")):
    if needed.marker is None or needed.marker.evaluate({"extra": ""}):
        assert version(needed.name) in needed.specifier, f"{needed}: found {version(needed.name)}"
for group in ("sglang.srt.platforms", "sglang.srt.plugins"):
    (point,) = entry_points(group=group, name="nvfp4_sgl")
    assert callable(point.load()), point
assert nvfp4_sgl.__file__.startswith(sys.prefix), nvfp4_sgl.__file__
print(version("nvfp4-sgl"))
"""


def version_of(root: Path) -> str:
    """``__version__`` as the sources say it; ValueError unless it is ``X.Y.Z``."""
    text = (root / "nvfp4_sgl" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    if match is None or not re.fullmatch(r"\d+\.\d+\.\d+", match[1]):
        raise ValueError(f"nvfp4_sgl/__init__.py: __version__: expected X.Y.Z, found {match and match[1]!r}")
    return match[1]


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def changelog_faults(text: str, version: str) -> list[str]:
    """Faults of the changelog for ``version``."""
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    found = []
    if titles[:1] != ["[Unreleased]"] or sections[0].partition("\n")[2].strip():
        found.append(f"CHANGELOG.md: expected an empty section [Unreleased], then [{version}]; move the lines there")
    if len(titles) < 2 or not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", titles[1]):
        found.append(f"CHANGELOG.md: second section: expected [{version}] - YYYY-MM-DD, found {titles[1:2]}")
    return found


def faults(root: Path) -> list[str]:
    """Everything that keeps the checkout ``root`` from being released, each with what to do."""
    version = version_of(root)
    found = changelog_faults((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    try:
        changed, tags = git(root, "status", "--porcelain"), git(root, "tag", "--points-at", "HEAD").splitlines()
    except subprocess.CalledProcessError as error:
        found.append(f"git: expected a repository with a commit: {error.stderr.strip()}")
    else:
        if changed:
            found.append(f"git: files differ from the last commit; commit or remove them: {changed.splitlines()[:5]}")
        if f"v{version}" not in tags:
            found.append(f"git: the last commit has no tag v{version}; run: git tag --annotate v{version}")
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text(encoding="utf-8"):
        found.append(f"CITATION.cff: version: expected {version}")
    with (root / "pyproject.toml").open("rb") as file:
        addresses = tomllib.load(file)["project"].get("urls", {})
    found += [f"pyproject.toml: [project.urls] {name}: missing" for name in ADDRESSES if name not in addresses]
    return found


def build(root: Path, folder: Path) -> tuple[Path, Path]:
    """The sdist of ``root`` and the wheel made from that sdist, in ``folder``; no package index is asked."""
    command = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", command, folder], cwd=root, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", folder, sdist], check=True)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def install(archive: Path, folder: Path) -> str:
    """Install ``archive`` in a new environment ``folder`` that has the pinned distributions, and load its parts.

    Returns:
        The installed version.

    Raises:
        subprocess.CalledProcessError: it does not install, needs another version of something, or a part does not load.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    # pip's resolver would take 15 s over SGLang's own requirements; the probe compares those of this distribution.
    (site,) = folder.glob("lib/python3*/site-packages")
    shutil.copy(Path(sysconfig.get_path("purelib")) / "_base.pth", site)
    options = (
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--no-compile",
        "--disable-pip-version-check",
    )
    subprocess.run([python, "-m", "pip", "install", *options, archive], cwd=folder, check=True)
    subprocess.run([folder / "bin" / "nvfp4-sgl", "--version"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return subprocess.run(
        [python, "-I", "-c", PROBE], cwd=folder, check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/release")
    parser.add_argument("--check", action="store_true", help="say what keeps this checkout from being released")
    options = parser.parse_args(arguments)
    found = faults(ROOT)
    for fault in found:
        print(fault, file=sys.stderr)
    if found or options.check:
        return 1 if found else 0
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for archive in build(ROOT, ROOT / "dist"):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{archive.relative_to(ROOT)}: installs, version {install(archive, Path(folder))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
