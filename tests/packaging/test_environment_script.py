"""``launch/environment --clean``, and what the scripts of ``launch`` do where they are called through a link."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT

SCRIPT = ROOT / "launch" / "environment"


def run(script: Path, cache: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The script without HOME."""
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment |= {"XDG_CACHE_HOME": str(cache), **more}
    return subprocess.run([script, *arguments], env=environment, capture_output=True, text=True, timeout=60, cwd="/")


def environment(cache: Path, name: str) -> Path:
    folder = cache / "nvfp4-sgl" / name
    (folder / "base").mkdir(parents=True)
    (folder / "base" / "file").write_bytes(b"x" * 100_000)
    (folder / "lock").touch()
    return folder


@pytest.fixture
def current(tmp_path: Path) -> Path:
    """The folder of this checkout in a cache of its own, as the script names it; nothing is built."""
    said = run(SCRIPT, tmp_path, "--clean").stderr
    return environment(tmp_path, Path(said.split("kept ")[1].split(",")[0]).name)


def test_clean_removes_other_environments_alone(tmp_path: Path, current: Path) -> None:
    old, other = environment(tmp_path, "0123456789abcdef"), environment(tmp_path, "kernels")
    foreign = environment(tmp_path, "fedcba9876543210")
    (foreign / "lock").unlink()
    busy = environment(tmp_path, "00000000ffffffff")
    with (busy / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(SCRIPT, tmp_path, "--clean")
    assert (done.returncode, done.stdout) == (0, "")
    assert not old.exists() and f"removed {old}, freed 1" in done.stderr
    assert all((folder / "base" / "file").is_file() for folder in (current, other, foreign, busy))
    assert f"{busy} is in use" in done.stderr and f"kept {current}," in done.stderr


def test_a_link_to_the_script_works_elsewhere_with_another_python3(tmp_path: Path, current: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").write_text("#!/bin/sh\nexit 1\n")
    (folder / "python3").chmod(0o755)
    (folder / "env").symlink_to(SCRIPT)
    done = run(folder / "env", tmp_path, "--clean", PATH=f"{folder}:{os.environ['PATH']}")
    assert done.returncode == 0 and f"kept {current}," in done.stderr


def test_an_unknown_argument_is_refused(tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path, "--clear")
    assert done.returncode == 2 and "expected nothing, --clean or --help, found --clear" in done.stderr


def test_neither_home_nor_cache_folder_need_be_set() -> None:
    """Up to its arguments: beyond them it would work in this user's own cache."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run([SCRIPT, "--clear"], env=environment, capture_output=True, text=True, timeout=60)
    assert "unbound" not in done.stderr and "expected nothing, --clean or --help" in done.stderr


def test_every_script_follows_links() -> None:
    scripts = [file for file in (ROOT / "launch").iterdir() if file.is_file() and "BASH_SOURCE" in file.read_text()]
    assert len(scripts) > 10
    for script in scripts:
        text = script.read_text()
        assert text.count("BASH_SOURCE[0]") == text.count('readlink -f "${BASH_SOURCE[0]}"'), script


def own_environment() -> Path:
    """The checkout's environment, if this Python runs in one."""
    if not (Path(sys.prefix) / "complete").exists():
        pytest.skip("this Python is not in an environment that launch/environment made")
    return Path(sys.prefix)


def activated(command: str) -> str:
    """What ``command`` prints in a shell after the documented ``source .../bin/activate``."""
    script = f'source "{own_environment()}/bin/activate" && {command}'
    done = subprocess.run(["bash", "-c", script], cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_console_script_of_the_pins_runs_with_the_checkout_s_python() -> None:
    """``sglang`` then finds this checkout's plugin."""
    folder = own_environment() / "bin"
    # Importing setuptools adds its private copies of distributions to sys.path; only what is installed has a script.
    path = [entry for entry in sys.path if Path(entry).name == "site-packages"]
    installed = [point for found in distributions(path=path) for point in found.entry_points]
    names = sorted({point.name for point in installed if point.group == "console_scripts"})
    assert {"sglang", "hf", "pytest", "pip", "mypy", "mkdocs", "openai", "nvfp4-sgl"} <= {*names}
    found = activated("command -v " + " ".join([*names, "ninja", "ruff", "uv"]))
    assert {Path(line).parent for line in found.splitlines()} == {folder}
    for name in names:
        head = (folder / name).read_bytes()[:500]
        assert head.startswith(b"\x7fELF") or f"{folder}/python".encode() in head, name


def test_pip_acts_on_the_checkout_s_environment() -> None:
    report = json.loads(activated("pip --disable-pip-version-check inspect --local"))
    assert [entry["metadata"]["name"] for entry in report["installed"]] == ["nvfp4-sgl"]
    assert report["environment"]["python_full_version"] == platform.python_version()


def test_what_is_installed_is_compiled() -> None:
    """Importing would write bytecode one file at a time, and nowhere where PYTHONDONTWRITEBYTECODE is set."""
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None
    package = Path(found.origin).parent
    if not (package.parents[3] / "complete").exists():
        pytest.skip("this Python is not in an environment that launch/environment made")
    sources = [*package.rglob("modeling_*.py")]
    compiled = [file for file in sources if Path(importlib.util.cache_from_source(str(file))).exists()]
    assert len(sources) > 300 and len(compiled) == len(sources)
