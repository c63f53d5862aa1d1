"""mkdocs hook: adds the notebooks of ``launch/results`` and the API reference to the site, with links that work.

Pages link to a result as files of the repository do, ``../launch/results/NAME.md``; the site has it as
``results/NAME.md``. The menu has the list of results alone, which leads to each. ``api_reference.py`` makes the pages
``api/NAME.md``. A page that exists only in some checkouts is listed in :data:`OPTIONAL`.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import api_reference
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "launch" / "results"
STYLE = ROOT / "launch" / "site.css"
CELL = re.compile(r"<t([dh])[ >].*?</t\1>", re.DOTALL)
TAG = re.compile(r"(<[^>]+>)")
UNBROKEN = re.compile(r"\S*-\w\S*|\d[\d,.]* (?:ms|µs|s|%|×|[GM]i?B|[GT]B/s|TFLOP/s|tokens/s)(?!\w)")
"""Words with a hyphen, and a figure with its unit."""
OPTION = re.compile(r"<code>(-[^<\s]*)")
WIDE_CELL_LETTERS = 30
"""A cell of at least so many letters keeps its column wide enough for words on a narrow page."""
OPTIONAL = {"Use it": [("Security", "security.md")]}
"""Navigation entries by section, for pages that are added if their file is there."""


def on_config(config: Any) -> Any:
    """Complete the navigation by what is generated or optional, and every page by version and repository."""
    for section in config["nav"]:
        for title, pages in section.items():
            for name, file in OPTIONAL.get(title, ()):
                if (Path(config["docs_dir"]) / file).is_file():
                    pages.append({name: file})
    reference = [{page.title: f"api/{name}.md"} for name, page in api_reference.PAGES.items()]
    config["nav"].append({"API reference": reference})
    config["nav"].append({"Results": "results.md"})
    config["copyright"] = f"nvfp4-sgl {version()}"
    config["repo_url"] = repository()
    config["extra_css"].append(STYLE.name)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the API reference, the recorded results and the style of tables."""
    for name, markdown in api_reference.pages().items():
        files.append(File.generated(config, f"api/{name}.md", content=markdown))
    for file in results():
        files.append(File.generated(config, f"results/{file.name}", abs_src_path=str(file)))
    files.append(File.generated(config, STYLE.name, abs_src_path=str(STYLE)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to results at their pages."""
    return markdown.replace("](../launch/results/", "](results/")


def on_page_content(html: str, **_: Any) -> str:
    """Keep options, and in cells dates, names of models and figures with their units, on one line."""
    html = CELL.sub(lambda match: cell(match[0]), html)
    return OPTION.sub(r'<code><span class="unbroken">\1</span>', html)


def cell(html: str) -> str:
    """A table's cell without breaks within words; class ``words`` if it holds a sentence."""
    parts = TAG.split(html)
    letters = sum(len(part) for part in parts if not part.startswith("<"))
    if letters >= WIDE_CELL_LETTERS and "<code>" not in parts:
        parts[1] = f'{parts[1][:3]} class="words"{parts[1][3:]}'
    return "".join(map(unbroken, parts))


def unbroken(part: str) -> str:
    return part if part.startswith("<") else UNBROKEN.sub(r'<span class="unbroken">\g<0></span>', part)


def results() -> list[Path]:
    return sorted(RESULTS.glob("*.md"))


def version() -> str:
    """The package's version, read without importing the package."""
    text = (ROOT / "nvfp4_sgl" / "__init__.py").read_text(encoding="utf-8")
    return next(line.split('"')[1] for line in text.splitlines() if line.startswith("__version__ = "))


def repository() -> str | None:
    """The address where the sources are published; ``None`` while pyproject.toml names none."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["urls"].get("Source")
