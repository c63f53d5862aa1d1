"""mkdocs hook: adds the notebooks of ``launch/results`` and the API reference to the site, with links that work.

Pages link to a result as files of the repository do, ``../launch/results/NAME.md``; the site has it as
``results/NAME.md``. ``api_reference.py`` makes the pages ``api/NAME.md``. A page that exists only in some checkouts is
listed in :data:`OPTIONAL`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import api_reference
from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).resolve().parent / "results"
OPTIONAL = {"Use it": [("Security", "security.md")]}
"""Navigation entries by section, for pages that are added if their file is there."""


def on_config(config: Any) -> Any:
    """Add the optional pages to the navigation, then the API reference and the results as sections of it."""
    for section in config["nav"]:
        for title, pages in section.items():
            for name, file in OPTIONAL.get(title, ()):
                if (Path(config["docs_dir"]) / file).is_file():
                    pages.append({name: file})
    reference = [{page.title: f"api/{name}.md"} for name, page in api_reference.PAGES.items()]
    config["nav"].append({"API reference": reference})
    config["nav"].append({"Results": ["results.md", *(f"results/{file.name}" for file in results())]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the API reference and the recorded results."""
    for name, markdown in api_reference.pages().items():
        files.append(File.generated(config, f"api/{name}.md", content=markdown))
    for file in results():
        files.append(File.generated(config, f"results/{file.name}", abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to results at their pages."""
    return markdown.replace("](../launch/results/", "](results/")


def results() -> list[Path]:
    return sorted(RESULTS.glob("*.md"))
