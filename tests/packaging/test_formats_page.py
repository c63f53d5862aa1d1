"""docs/formats.md prints the table by which targets refuse matrices; what it says is what they do."""

from __future__ import annotations

import pytest

from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.synthetic.tiny_config import TinyFormat
from nvfp4_sgl.targets.requirements import check_target
from nvfp4_sgl.targets.storages import how, table
from nvfp4_sgl.targets.target import words
from tests.packaging.checkout import ROOT
from tests.support.released import FLASH

PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")


def test_the_page_prints_the_table() -> None:
    found = PAGE.partition("<!-- storages -->\n")[2].partition("\n<!-- end -->")[0]
    assert found == table(), "print it: python -c 'from nvfp4_sgl.targets.storages import table; print(table())'"


def test_the_readme_leads_there_and_the_page_names_every_tiny_format() -> None:
    assert "(docs/formats.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{format.value}`" in PAGE for format in TinyFormat)


@pytest.mark.parametrize("target", words())
@pytest.mark.parametrize("storage", Storage)
def test_a_target_refuses_what_the_table_says(storage: Storage, target: str) -> None:
    config = ModelConfig.from_dict(FLASH)
    if how(target, storage) is not None:
        check_target(target, config, 1, lambda stem: Storage.NVFP4 if ".ffn.experts." in stem else storage)
        if "routed experts: refused" in str(how(target, storage)):
            with pytest.raises(UnsupportedError, match=rf"ffn\.experts\.0\.w1\.weight' \({storage.value}\)"):
                check_target(target, config, 1, lambda stem: storage)
        else:
            check_target(target, config, 1, lambda stem: storage)
        return
    with pytest.raises(UnsupportedError, match=rf"wq_a\.weight' \({storage.value}\).*docs/formats\.md"):
        check_target(target, config, 1, lambda stem: storage)
