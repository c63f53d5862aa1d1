"""constraints.txt pins the whole closure, exactly, and what is installed is what it pins."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires, version

import pytest
from packaging.requirements import Requirement

from tests.packaging.checkout import KERNEL_FOLDERS, ROOT, canonical, imports, sources

SELF = "nvfp4-sgl"
PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.!]+)")


def pins() -> dict[str, str]:
    """Pinned version by canonical name; anything but ``name==version`` in the file fails."""
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        match = PIN.fullmatch(line)
        assert match, f"constraints.txt: expected name==version, found {line!r}"
        name = canonical(match["name"])
        assert name not in found, f"constraints.txt pins {name} twice"
        found[name] = match["version"]
    return found


def needed(name: str, extra: str) -> Iterator[Requirement]:
    """Direct requirements of an installed distribution with one extra (or none: ``""``) on this interpreter."""
    for text in requires(name) or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def closure() -> set[str]:
    """Canonical names of everything that this distribution with its extras leads to, itself left out."""
    queue, seen = [(SELF, ""), (SELF, "dev"), (SELF, "docs")], set()
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        for requirement in needed(*node):
            name = canonical(requirement.name)
            queue += [(name, ""), *((name, extra) for extra in requirement.extras)]
    return {name for name, _ in seen} - {SELF}


def test_closure_is_pinned_and_nothing_else() -> None:
    pinned = pins()
    reached = closure()
    assert len(reached) > 100, "the walk over the requirements broke off"
    assert not reached - set(pinned), "not pinned; run launch/lock"
    assert not set(pinned) - reached, "pinned, but nothing needs it; run launch/lock"


def test_installed_versions_are_the_pinned_ones() -> None:
    wrong = {name: (version(name), pin) for name, pin in pins().items() if version(name) != pin}
    assert not wrong, f"(installed, pinned): {wrong}; launch/environment makes a right environment"


def test_own_pins_agree_with_constraints() -> None:
    pinned = pins()
    for requirement in [*needed(SELF, "dev"), *needed(SELF, "docs")]:
        assert requirement.specifier.contains(pinned[canonical(requirement.name)]), requirement


TYPE_CHECKERS = {"_typeshed"}
"""Modules that type checkers bring along, and nothing imports when it runs."""
ALSO_PROVIDED_BY = {
    "cutlass": ["nvidia-cutlass-dsl"],
    "cuda": ["nvidia-cutlass-dsl"],
    "compressed_tensors": ["sglang"],
    "jsonschema": ["sglang"],
    "msgspec": ["sglang"],
    "prometheus_client": ["sglang"],
    "setproctitle": ["sglang"],
    "starlette": ["sglang"],
    "xgrammar": ["sglang"],
}
"""``cutlass`` lies in a folder that a ``.pth`` file adds to the path, which ``packages_distributions`` does not look
into. ``cuda`` comes with CuTeDSL, which requires it and whose functions take its types; the others with SGLang, which
reads checkpoints, checks schemas, sends messages, publishes metrics, names its processes, serves HTTP and compiles
grammars by them."""


@pytest.mark.parametrize(
    ("folders", "extra"),
    [(("nvfp4_sgl", *KERNEL_FOLDERS), ""), (("tests", "launch", "examples"), "dev")],
    ids=["package", "dev"],
)
def test_what_is_imported_is_declared(folders: tuple[str, ...], extra: str) -> None:
    """Each third-party module that our code imports belongs to a distribution that pyproject.toml names."""
    extras = ("dev", "docs") if extra == "dev" else (extra,)
    declared = {canonical(requirement.name) for extra in extras for requirement in needed(SELF, extra)}
    providers = packages_distributions()
    # Scripts in launch/ import each other, and the packages beside them, by bare name.
    scripts = {file.stem for file in (ROOT / "launch").glob("*.py")}
    packages = {file.parent.name for file in (ROOT / "launch").glob("*/__init__.py")}
    own = {"nvfp4_sgl", "tests", "examples", *KERNEL_FOLDERS, *packages, *scripts}
    for file in [file for folder in folders for file in sources(ROOT / folder)]:
        for found in imports(file.read_text()):
            if found.level or found.top in own or found.top in sys.stdlib_module_names | TYPE_CHECKERS:
                continue
            provided_by = [*providers.get(found.top, ()), *ALSO_PROVIDED_BY.get(found.top, ())]
            distributions = {canonical(name) for name in provided_by}
            assert distributions & declared, f"{file.relative_to(ROOT)}:{found.line}: {found.top} is not declared"
