"""docs/formats.md lists the fields of ``--json``: these, with these types, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl import cli
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.target import words
from tests.packaging.checkout import ROOT
from tests.support.damage import change_tensor, set_byte

TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "object": dict, "null": type(None)}
SIZES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 6}


def documented(section: str) -> dict[str, set[type]]:
    """Types by path."""
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    block = page.partition(f"<!-- {section} json -->\n```\n")[2].partition("\n```\n<!-- end -->")[0]
    fields = {}
    for line in block.splitlines():
        path, words = line.split(maxsplit=1)
        names = words.split("  ")[0].split(" or ")
        fields[path] = {TYPES[name] for name in names}
    return fields


def found(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of all that an object holds: leaves, and objects that may be null."""
    if isinstance(value, dict):
        if path in ("draft", "values", "inspection", "comparison", "comparison.draft"):
            yield path, value
        if path == "inspection":
            return
        for name, inner in value.items():
            name = "TARGET" if name in words() else name
            name = "STORAGE" if name in {storage.value for storage in Storage} else name
            yield from found(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for inner in value:
            yield from found(inner, f"{path}[]")
    else:
        yield path, value


def check(section: str, reports: list[dict[str, Any]]) -> None:
    """Every field is documented with its type, and every documented one occurs."""
    fields, seen = documented(section), set()
    assert fields
    for report in reports:
        for path, value in found(report):
            assert path in fields, path
            allowed = fields[path] | ({int} if float in fields[path] else set())
            assert type(value) in allowed, (path, value)
            seen.add(path)
    assert seen == fields.keys()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fields")
    for format in ("nvfp4-full", "deepseek", "compressed-tensors"):
        draft = "dspark" if format == "deepseek" else None
        write_tiny(root / format, format, seed=2, draft=draft, **SIZES)
    write_tiny(root / "longer", "nvfp4-full", seed=2, **(SIZES | {"num_hidden_layers": 4}))
    write_tiny(root / "damaged", "nvfp4-full", seed=2, **SIZES)
    change_tensor(root / "damaged", "layers.0.attn.wq_a.weight_scale", set_byte(0, 0xFF))
    change_tensor(root / "damaged", "layers.0.attn.wq_b.weight_scale", lambda d, s, data: (d, s, b"\x7e" * len(data)))
    return {directory.name: directory for directory in root.iterdir()}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    cli.main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def test_fields_of_inspect(reports: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"nvfp4-full": (), "deepseek": ("--values",), "compressed-tensors": ("--scales",), "damaged": ("--values",)}
    check("inspect", [run(capsys, "inspect", reports[name], *flags[name]) for name in flags])


def test_fields_of_verify(reports: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [("nvfp4-full", "deepseek"), ("longer", "damaged"), ("damaged", "longer")]
    found = [run(capsys, "verify", reports[a], "--against", reports[b]) for a, b in pairs]
    check("verify", [*found, run(capsys, "verify", reports["nvfp4-full"])])
    inside = [report["inspection"] for report in found]
    check("inspect", [*inside, *(run(capsys, "inspect", reports[name]) for name in ("deepseek", "compressed-tensors"))])
