"""The API reference: public names with their docstrings, in Markdown that says what the docstring says."""

from __future__ import annotations

import re
import sys

import pytest

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its packages are imported by bare name
import api_reference

PAGES = api_reference.pages()


def entry(page: str, name: str) -> str:
    """What a page says of one name."""
    found = re.search(rf"^#+ `[\w.]+` {{ #{re.escape(name)} }}\n(.*?)(?=^#{{1,4}} |\Z)", PAGES[page], re.M | re.S)
    assert found, f"{page}: no {name}"
    return found[1]


def test_every_public_name_is_documented() -> None:
    assert api_reference.undocumented() == []


def test_names_of_a_module_are_there_and_private_ones_are_not() -> None:
    names = re.findall(r"{ #formats\.nvfp4\.(\w+) }", PAGES["formats"])
    assert {"NvFp4Tensor", "quantize_weight", "quantize_rows", "AMAX_FLOOR"} <= set(names)
    assert not [name for page in PAGES.values() for name in re.findall(r"{ #[\w.]*\.(_\w+) }", page)]
    assert "store_kv_entry " not in PAGES["triton_kernels"], "a device function"
    assert "#triton_kernels.entries.kv_entry.store_kv_entries " in PAGES["triton_kernels"]


def test_a_function_has_its_signature_and_arguments() -> None:
    found = entry("gemms", "cutedsl_kernels.w4a16.operations.product")
    assert "    weights: TiledWeights,\n    *,\n    out: Tensor | None = None," in found
    assert "**Arguments**\n\n- `tokens`: bf16 [T, K]" in found and "**Returns**: ``out``." in found


def test_a_class_has_its_fields_and_methods() -> None:
    found = entry("boundaries", "model.contract.Activation")
    assert "@dataclass(frozen=True)\nclass Activation:\n    values: Tensor | None = None\n" in found
    assert "- `values`: [T, K] or [T, G, K] in the model dtype." in found
    assert "- `VALUES`: Values in the model dtype." in entry("boundaries", "model.contract.Form")
    assert "def extend(self, tokens: Mapping" in entry("standalone", "standalone.Standalone.extend")


@pytest.mark.parametrize("page", PAGES)
def test_no_markup_of_docstrings_is_left(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.M | re.S)
    assert not re.search(r":\w+:`|::$|^(?:Args|Raises|Attributes):$|^==", text, re.M)


def test_literal_blocks_stay_as_they_are() -> None:
    assert "```text\ng    = max(amax over N,K, 2^-100) / 2688\n" in entry("formats", "formats.nvfp4.quantize_weight")
