"""SGLang's probe for the third-party ``triton_kernels`` never finds our folder of that name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nvfp4_sgl.serving.probe import checkout_root

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import importlib.util, sys
import sglang.srt.platforms as platforms
platforms.current_platform
from sglang.srt.utils.common import is_triton_kernels_available
spec = importlib.util.find_spec("triton_kernels")
print("PROBE", is_triton_kernels_available(), None if spec is None else spec.origin)
"""


def probe(folder: Path, code: str = PROBE) -> str:
    """Run ``code`` with ``folder`` as the current directory, which is on the path."""
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return next(line for line in run.stdout.splitlines() if line.startswith("PROBE"))


@pytest.mark.skipif(checkout_root() is None, reason="not run from a checkout")
def test_same_answer_in_the_checkout_as_elsewhere(tmp_path: Path) -> None:
    answer = "s = importlib.util.find_spec('triton_kernels'); print('PROBE', s is not None, s and s.origin)"
    assert probe(ROOT) == probe(tmp_path, "import importlib.util; " + answer)


def test_the_folder_would_be_found_without_the_hook() -> None:
    """The negative control: this is what the hook is for."""
    assert (ROOT / "triton_kernels" / "__init__.py").is_file()
    found = probe(ROOT, "import importlib.util as u; print('PROBE', u.find_spec('triton_kernels').origin)")
    assert str(ROOT / "triton_kernels") in found


def test_other_imports_from_the_checkout_still_work() -> None:
    code = """
from nvfp4_sgl.serving.probe import hide_kernel_folders
import importlib.util, pkgutil
hide_kernel_folders(); hide_kernel_folders()
assert importlib.util.find_spec("tests.support.server") is not None
assert "nvfp4_sgl" in {module.name for module in pkgutil.iter_modules(['.'])}
import nvfp4_sgl.triton_kernels
print("PROBE", importlib.util.find_spec("cutedsl_kernels"))
"""
    assert probe(ROOT, code) == "PROBE None"
