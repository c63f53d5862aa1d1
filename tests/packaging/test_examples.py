"""The examples run as they are, and give what they claim."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples import decoder, one_layer, one_op
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.packaging.checkout import ROOT


def test_one_op() -> None:
    weight, w4a16, w4a4 = one_op.main().values()
    assert 0.08 < weight < 0.11, "normally distributed weights lose 9.5 %"
    assert w4a16 < 2e-6 and 0.02 < w4a4 < 0.15


def test_one_layer() -> None:
    shapes = one_layer.main()
    assert shapes["streams behind the layer"] == (one_layer.ADDED, 4, 256)
    names = [f"{end} of layers.1.{part}" for part in ("attn", "ffn") for end in ("input", "output")]
    assert [shapes[name] for name in names] == [(one_layer.ADDED, 256)] * 4


def test_the_decoder_alone(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", "nvfp4-full", seed=3)
    assert len(decoder.main(tmp_path / "tiny")) == decoder.NEW


@pytest.mark.parametrize("script", ["server.py", "function_calling.py"])
def test_what_needs_an_argument_says_so(script: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(f"usage: python examples/{script} ")


def test_every_example_has_a_test_and_stands_in_the_documentation() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    tests = [ROOT / "tests" / name for name in ("packaging/test_examples.py", "serving/test_examples.py")]
    tested = "".join(file.read_text() for file in [*tests, ROOT / "tests/triton/test_own_kernel.py"])
    names = {file.relative_to(ROOT / "examples").parts[0] for file in (ROOT / "examples").rglob("*.py")}
    assert len(names) >= 6
    for name in names:
        assert f"`examples/{name}" in page, f"docs/examples.md does not name examples/{name}"
        assert name.removesuffix(".py") in tested
