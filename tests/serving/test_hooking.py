"""Hooks reach every module that imported a hooked function, and modules are searched once for all hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.serving.sglang import hooking
from nvfp4_sgl.serving.sglang.ledger import find
from nvfp4_sgl.serving.sglang.private import Private

DEFINES = """
def double(x): return 2 * x
def triple(x): return 3 * x
class Number:
    def half(self, x): return x / 2
    @classmethod
    def name(cls): return cls.__name__
"""
IMPORTS = "from hooked_defines import double, triple as thrice\nhalf = __import__('hooked_defines').Number.half"


def made(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(source, vars(module))
    return module


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A module that defines functions, and one that has imported them; SGLang's registry is as if it held no hook."""
    registry = find("HookRegistry")
    monkeypatch.setattr(registry, "_hooks", type(registry._hooks)(list))
    monkeypatch.setattr(registry, "_patched", set())
    monkeypatch.setattr(hooking, "HOOKS", {})
    yield made("hooked_defines", DEFINES, monkeypatch), made("hooked_imports", IMPORTS, monkeypatch)


def install(hooks: dict[str, Callable[..., Any]]) -> None:
    hooking.HOOKS.update({path: Private(path, "a test's") for path in hooks})
    hooking.install_hooks(hooks)


def negative(original: Callable[..., Any], *args: Any) -> Any:
    return -original(*args)


def test_importers_get_the_wrapped_function(modules: tuple[Any, Any]) -> None:
    """Under whatever name they hold it; what no hook names stays as it is."""
    defines, imports = modules
    install({"hooked_defines.double": negative, "hooked_defines.Number.half": negative})
    assert defines.double(3) == imports.double(3) == -6
    assert defines.Number().half(4) == imports.half(None, 4) == -2
    assert imports.thrice(3) == 9


@pytest.mark.parametrize("package", ["numpy", "some_package"])
def test_a_library_is_searched_for_its_own_functions_alone(
    package: str, modules: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another plugin's hook may name a function of a library, which then has to reach all of the library."""
    imports = modules[1]
    if package not in sys.modules:
        made(package, "", monkeypatch)
    own = made(f"{package}.hooked_defines", "def fourfold(x): return 4 * x", monkeypatch)
    importing = f"from {package}.hooked_defines import fourfold\nfrom hooked_defines import double"
    theirs = made(f"{package}.hooked_imports", importing, monkeypatch)
    install({"hooked_defines.double": negative})
    assert imports.double(3) == -6 and theirs.double(3) == (6 if package in hooking.LIBRARIES else -6)
    install({f"{package}.hooked_defines.fourfold": negative})
    assert own.fourfold(3) == theirs.fourfold(3) == -12


def test_a_second_path_to_a_function_wraps_what_the_first_made(modules: tuple[Any, Any]) -> None:
    defines, imports = modules
    install({"hooked_defines.double": negative, "hooked_imports.double": lambda original, x: original(x) - 1})
    assert defines.double(3) == imports.double(3) == -7


def test_a_hook_that_another_plugin_has_registered_reaches_importers_too(modules: tuple[Any, Any]) -> None:
    find("HookRegistry").register("hooked_defines.triple", negative, find("HookType").AROUND)
    install({"hooked_defines.double": negative})
    assert modules[1].thrice(3) == -9


def test_class_methods_stay_such(modules: tuple[Any, Any]) -> None:
    install({"hooked_defines.Number.name": lambda original, cls: original(cls).lower()})
    assert modules[0].Number.name() == "number"


def test_sglang_s_search_is_there_afterwards(modules: tuple[Any, Any]) -> None:
    """Whether the hooks could be installed or not."""
    search = find("propagate_patch")
    with pytest.raises(UnsupportedError, match=r"refused hooks on hooked_defines\.nothing"):
        install({"hooked_defines.double": negative, "hooked_defines.nothing": negative})
    assert find("propagate_patch") is search and modules[1].double(3) == -6


def test_modules_are_searched_once(modules: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def _propagate_patch(*_: object) -> int:
        raise AssertionError("SGLang searched for a hook")

    monkeypatch.setattr(sys.modules["sglang.srt.plugins.hook_registry"], "_propagate_patch", _propagate_patch)
    install({"hooked_defines.double": negative, "hooked_defines.triple": negative})
    assert (modules[1].double(3), modules[1].thrice(3)) == (-6, -9)
