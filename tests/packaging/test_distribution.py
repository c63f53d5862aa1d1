"""What an installation of this distribution looks like: entry points, mapped kernel folders, no shadowed package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest

from nvfp4_sgl import __version__
from tests.packaging.checkout import KERNEL_FOLDERS, PACKAGE, ROOT, sources

sys.path.append(str(ROOT / "launch"))

from programs import release

PROBE = """
import importlib, importlib.util, json, sys
sys.path[:0] = sys.argv[1:]
found = {name: importlib.import_module(name).__file__ for name in (
    "nvfp4_sgl", "nvfp4_sgl.errors", "nvfp4_sgl.triton_kernels", "nvfp4_sgl.cutedsl_kernels")}
for name in ("triton_kernels", "cutedsl_kernels"):
    spec = importlib.util.find_spec(name)
    found["top-level " + name] = spec and spec.origin
print(json.dumps(found))
"""


def probe(cwd: Path, *path: Path) -> dict[str, str | None]:
    """Where a fresh interpreter finds our packages, and the top-level names of our folders; ``path`` comes first."""
    command = [sys.executable, "-I", "-c", PROBE, *map(str, path)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An sdist built from a copy of the checkout's files and the wheel built from it, without any package index."""
    folder = tmp_path_factory.mktemp("archives")
    copy = folder / "source"
    ignored = shutil.ignore_patterns(".git", "build", "dist", "__pycache__", "*.egg-info", ".*_cache")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    sdist, wheel = release.build(copy, folder)
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(scope="module")
def wheel(archives: dict[str, Path]) -> Path:
    return archives["wheel"]


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("sglang.srt.platforms", "nvfp4_sgl", "nvfp4_sgl.plugin:activate"),
        ("sglang.srt.plugins", "nvfp4_sgl", "nvfp4_sgl.plugin:register"),
        ("console_scripts", "nvfp4-sgl", "nvfp4_sgl.entry:main"),
    ],
)
def test_entry_points_resolve(group: str, name: str, value: str) -> None:
    (point,) = entry_points(group=group, name=name)
    assert point.value == value
    assert callable(point.load())


def test_installed_version_is_this_one() -> None:
    assert distribution("nvfp4-sgl").version == __version__


def test_wheel_holds_every_source_file_at_its_mapped_place(wheel: Path) -> None:
    expected = {str(file.relative_to(ROOT)) for file in sources(PACKAGE)} | {"nvfp4_sgl/py.typed"}
    for folder in KERNEL_FOLDERS:
        expected |= {f"nvfp4_sgl/{file.relative_to(ROOT)}" for file in sources(ROOT / folder)}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.fixture(scope="module")
def unpacked(archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist's top folder."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(archives["sdist"]) as tar:
        tar.extractall(folder, filter="data")
    return folder / archives["sdist"].name.removesuffix(".tar.gz")


def test_sdist_is_the_checkout(unpacked: Path) -> None:
    """Pins, tests, documents and scripts, executable where they were; links to the kernel folders stay links."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    missing = [name for name in listed.splitlines() if not os.path.lexists(unpacked / name)]
    assert not missing, "name what is new at the top level in launch/src/nvfp4_sgl_sdist.py"
    for folder in KERNEL_FOLDERS:
        assert (unpacked / "nvfp4_sgl" / folder).is_symlink()
    for name in ("constraints.txt", "tests/conftest.py", "examples/one_op.py", "CHANGELOG.md"):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()
    assert os.access(unpacked / "launch" / "test", os.X_OK)


def test_a_clean_environment_of_the_pins_installs_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """It was built from the sdist. Nothing pinned must move, SGLang finds both entry points, and the command runs."""
    assert release.install(wheel, tmp_path / "environment") == __version__


def test_wheel_installs_and_leaves_the_third_party_name_alone(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    found = probe(tmp_path, site)
    assert found["nvfp4_sgl"] == str(site / "nvfp4_sgl/__init__.py")
    for folder in KERNEL_FOLDERS:
        assert found[f"nvfp4_sgl.{folder}"] == str(site / "nvfp4_sgl" / folder / "__init__.py")
    check_top_level_names(found, site)


def test_editable_installation_leaves_the_third_party_name_alone(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert Path(found["nvfp4_sgl"] or "").resolve() == PACKAGE / "__init__.py"
    for folder in KERNEL_FOLDERS:
        assert Path(found[f"nvfp4_sgl.{folder}"] or "").resolve() == ROOT / folder / "__init__.py"
    check_top_level_names(found, ROOT)


def test_the_checkout_s_top_leaves_the_third_party_name_alone() -> None:
    """SGLang imports ``triton_kernels`` for other architectures; the folder where it was started comes first."""
    code = """
import importlib.util, triton_kernels, triton_kernels.swiglu, nvfp4_sgl.triton_kernels.quantize
assert importlib.util.find_spec("triton_kernels.matmul")
print(triton_kernels.__file__, triton_kernels.swiglu.__name__, nvfp4_sgl.triton_kernels.__file__, sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    third_party, module, own = done.stdout.splitlines()
    assert third_party == str(distribution("sglang-kernel").locate_file("triton_kernels/__init__.py"))
    assert module == "triton_kernels.swiglu" and Path(own).resolve() == ROOT / "triton_kernels" / "__init__.py"


@pytest.mark.parametrize("name", [*KERNEL_FOLDERS, "triton_kernels.quantize"])
def test_without_the_third_party_our_folders_are_no_modules(name: str) -> None:
    """As if nothing was installed: callers catch :class:`ModuleNotFoundError`."""
    code = f"""
import sys
sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
try:
    import {name}
except ModuleNotFoundError as error:
    print(error.name)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (name.partition(".")[0] + "\n", "")


MISUSE = """
from nvfp4_sgl.cutedsl_kernels.errors import LaunchError
from nvfp4_sgl.terminal import fitted

fitted(3)
error: int = LaunchError()
"""


def test_type_checkers_see_the_types_from_any_folder(tmp_path: Path) -> None:
    """The package's, and those of the kernel folders that links give their place."""
    (tmp_path / "user.py").write_text(MISUSE)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "user.py"]
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert 'user.py:5: error: Argument 1 to "fitted" has incompatible type "int"; expected "str"' in done.stdout
    assert 'user.py:6: error: Incompatible types in assignment (expression has type "LaunchError"' in done.stdout
    assert "Found 2 errors in 1 file" in done.stdout, done.stdout


def check_top_level_names(found: dict[str, str | None], ours: Path) -> None:
    """``triton_kernels`` is the copy that sglang-kernel ships, never ours; ``cutedsl_kernels`` does not exist."""
    third_party = distribution("sglang-kernel").locate_file("triton_kernels/__init__.py")
    assert found["top-level triton_kernels"] == str(third_party)
    assert not Path(str(third_party)).is_relative_to(ours)
    assert found["top-level cutedsl_kernels"] is None
