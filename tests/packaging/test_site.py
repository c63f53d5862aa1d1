"""The documentation's site: it builds strictly, pictures show recorded figures, and cited sections exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from nvfp4_sgl import __version__
from tests.packaging.checkout import KERNEL_FOLDERS, ROOT, sources

sys.path.append(str(ROOT / "launch"))  # its packages are imported by bare name
import api_reference
from benchmarks import charts

SECTION = re.compile(r"^#+ (\d+(?:\.\d+)?)[. ]", re.MULTILINE)
CITED = re.compile(
    r"(?:DEEPSEEK_V4\.md|[Ss]pec(?:ification)?) (?:\(notation\), )?(?:§|sections? )([\d.]+\d|\d)"
    r"(?:(?:–|, §?| and | to )§?(\d[\d.]*\d|\d))?"
)


ADDRESSES = (
    *("add_a_storage", "add_a_target", "add_an_architecture", "add_an_op", "architecture", "ask_it"),
    *("benchmarks", "checkpoints", "coming_from", "command_line", "compatibility", "contributing", "convert"),
    *("cookbook", "deployment", "examples", "find_the_op", "first_light", "formats", "hopper"),
    *("hopper_gemm_tutorial", "how_it_works", "index", "install", "numerics", "own_kernel", "results", "sm100"),
    *("small_model", "specification", "speculative_decoding", "troubleshooting"),
    *(
        "cookbook#watch-it",
        "cookbook#compiling-ahead",
        "cookbook#new-weights-without-a-restart",
        "cookbook#a-container",
    ),
    *("hopper#gemms", "hopper#mode-w4a4", "hopper#triton-kernels", "hopper#how-it-is-known", "hopper#speed"),
    "compatibility#speculative-decoding",
    *("sm100#the-model", "sm100#how-they-are-known", "convert#without-a-copy-at-load", "convert#time-and-memory"),
)
"""Pages and sections that others may have linked: one that moves leaves an anchor with a link behind."""


def build(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    return subprocess.run([*command, "--site-dir", str(target)], capture_output=True, text=True)


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    done = build(ROOT / "launch" / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {file.stem for file in (tmp_path / "site").glob("*.html")}
    assert {file.stem for file in (ROOT / "docs").glob("*.md")} <= pages
    recorded = {file.stem for file in (ROOT / "launch" / "results").glob("*.md")}
    assert recorded == {file.stem for file in (tmp_path / "site" / "results").glob("*.html")}
    assert set(api_reference.PAGES) == {file.stem for file in (tmp_path / "site" / "api").glob("*.html")}
    html = "".join(file.read_text() for file in (tmp_path / "site").rglob("*.html"))
    assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', html), (
        "something is fetched from elsewhere"
    )
    gone = [address for address in ADDRESSES if not is_there(tmp_path / "site", *address.partition("#")[::2])]
    assert not gone, gone
    page = (tmp_path / "site" / "hopper.html").read_text()
    assert f"nvfp4-sgl {__version__}" in page and 'data-md-component="search"' in page
    links = re.findall(r'<a href="([^"]+)" class="md-nav__link', page)
    assert "results.html" in links and "index.html" in links
    assert not [link for link in links if link.startswith("results/")], "the menu leads to notebooks one by one"
    assert re.search(r'<td><span class="unbroken">20\d\d-\d\d-\d\d</span>', page), "a date may break in a cell"
    assert '<code><span class="unbroken">--' in html and "<code>--" not in html, "an option may break behind a hyphen"
    assert '<td class="words">' in page, "a column of words may be as narrow as a word on a telephone"


def is_there(site: Path, page: str, anchor: str) -> bool:
    file = site / f"{page}.html"
    return file.is_file() and (not anchor or f'id="{anchor}"' in file.read_text())


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("index.md", "\n[gone](gone.md)\n"),
        ("index.md", "\n[no such section](specification.md#99-nothing)\n"),
        ("index.md", "\n![no picture](pictures/gone.svg)\n"),
        ("index.md", "\n[no result](../launch/results/gone.md)\n"),
        ("orphan.md", "# A page that nothing leads to\n"),
    ],
    ids=["link", "anchor", "picture", "result", "page outside the navigation"],
)
def test_what_is_broken_stops_the_build(page: str, text: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "launch" / "results", tmp_path / "launch" / "results")
    for name in ("mkdocs.yml", "docs_hook.py", "api_reference.py", "site.css"):
        shutil.copy(ROOT / "launch" / name, tmp_path / "launch" / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "nvfp4_sgl").symlink_to(ROOT / "nvfp4_sgl")
    with (tmp_path / "docs" / page).open("a") as file:
        file.write(text)
    assert build(tmp_path / "launch" / "mkdocs.yml", tmp_path / "site").returncode != 0


def test_every_notebook_is_in_the_list_of_results() -> None:
    listed = re.findall(r"launch/results/(\w+)\.md", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(file.stem for file in (ROOT / "launch" / "results").glob("*.md"))


@pytest.mark.parametrize("name", charts.CHARTS)
def test_a_picture_is_drawn_from_the_recorded_figures(name: str) -> None:
    drawn = charts.draw(charts.CHARTS[name]())
    found = (charts.PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    assert found == drawn, "draw it again: launch/docs figures"


def test_a_chart_shows_what_the_result_says() -> None:
    """Two figures of each file, looked up by hand."""
    assert charts.flash(2).groups[0] == ("1 request", (Decimal("3.36"), Decimal("7.08")))
    assert charts.flash(4).groups[1] == ("16 requests", (Decimal("6.56"), Decimal("11.46")))
    assert charts.gemms().groups[0] == ("1 token", [Decimal("2.40"), Decimal("2.18"), Decimal("1.57")])
    assert charts.attention().groups[1] == ("64 heads, 640 keys", [Decimal("1.36"), Decimal("1.14"), Decimal("0.95")])
    assert charts.modelled().groups[0] == ("flash, TP 1", (1898.0, 984.0))
    with pytest.raises(ValueError, match="expected a table"):
        charts.table("flash_tp2_h200.md", "no such column")


def test_the_specification_has_every_section_that_the_code_cites() -> None:
    sections = set(SECTION.findall((ROOT / "docs" / "specification.md").read_text(encoding="utf-8")))
    assert len(sections) > 30
    cited: dict[str, str] = {}
    for folder in ("nvfp4_sgl", *KERNEL_FOLDERS, "tests", "examples"):
        for file in sources(ROOT / folder):
            for numbers in CITED.findall(file.read_text(encoding="utf-8")):
                cited |= {number: str(file.relative_to(ROOT)) for number in numbers if number}
    assert len(cited) > 25
    assert not {number: file for number, file in cited.items() if number not in sections}
