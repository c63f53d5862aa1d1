"""Installs hooks into functions of SGLang."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.serving.sglang.hooked import HOOKS
from nvfp4_sgl.serving.sglang.ledger import find, module
from nvfp4_sgl.serving.sglang.private import VERSION

LIBRARIES = frozenset(
    (
        *("torch", "torchvision", "torchaudio", "triton", "cutlass", "flashinfer", "cuda", "transformers", "numpy"),
        *("scipy", "sympy", "mpmath", "networkx", "openai", "pydantic", "aiohttp", "pynvml", "requests", "IPython"),
        *("huggingface_hub", "compressed_tensors", "fastapi", "starlette", "rich", "zmq"),
    )
)
"""Packages that import nothing of SGLang, and hold three quarters of all names that a server's modules have."""


class Bindings:
    """Places where modules hold some objects, found in one search.

    For each hook, SGLang searches every module for what was imported ``from`` the hooked one: 0.1 s, and a process of a
    server has fifty hooks. This looks through all but packages that are ``skipped``, whose memory a forked process
    shares while it does not look at it.
    """

    def __init__(self, objects: Iterable[object], skipped: Set[str] = frozenset()):
        wanted = {id(one) for one in objects}
        self._places: dict[int, list[tuple[ModuleType, str]]] = defaultdict(list)
        for module_name, holder in list(sys.modules.items()):
            if isinstance(holder, ModuleType) and module_name.partition(".")[0] not in skipped:
                for name, value in list(vars(holder).items()):
                    if id(value) in wanted:
                        self._places[id(value)].append((holder, name))

    def replace(self, original: object, wrapped: object, source_module: object) -> int:
        """Replace ``original`` by ``wrapped`` where modules hold it, and return in how many places.

        Has the parameters of SGLang's function, which it stands in for. The places are ``wrapped``'s from then on, for
        a hook around the same function under another path.
        """
        places = self._places.pop(id(original), [])
        self._places[id(wrapped)] += places
        stale = [(holder, name) for holder, name in places if vars(holder).get(name) is original]
        for holder, name in stale:
            setattr(holder, name, wrapped)
        return len(stale)


def install_hooks(around: dict[str, Callable[..., Any]]) -> None:
    """Wrap the functions named by keys of :data:`.hooked.HOOKS`: ``hook(original, *args, **kwargs)``.

    SGLang logs and ignores a hook that it cannot apply; this raises :class:`UnsupportedError`.
    """
    find("hook_logger").setLevel(logging.WARNING)  # else a line for each hook, among those of the start
    registry, kind = find("HookRegistry"), find("HookType").AROUND
    for name, hook in around.items():
        registry.register(HOOKS[name].path, hook, kind)
    paths = [path for path in registry._hooks if path not in registry._patched]
    bindings = Bindings(_functions(paths), LIBRARIES - {path.partition(".")[0] for path in paths})
    searching, replaced = module("hook_registry"), find("propagate_patch")
    setattr(searching, replaced.__name__, bindings.replace)
    try:
        registry.apply_hooks()
    finally:
        setattr(searching, replaced.__name__, replaced)
    failed = [HOOKS[name].path for name in around if HOOKS[name].path not in registry._patched]
    if failed:
        raise UnsupportedError(
            f"SGLang {VERSION} refused hooks on {', '.join(failed)}; the log above says why."
            f" Reinstall it unmodified: pip install --force-reinstall --no-deps 'sglang=={VERSION}'"
        )


def _functions(paths: Iterable[str]) -> Iterator[object]:
    """Functions that ``paths`` name, as modules that imported them hold them; imports the modules that define them.

    A path that names nothing is left to SGLang, which logs it.
    """
    for path in paths:
        with contextlib.suppress(ImportError, AttributeError):
            found = resolve_name(path)
            yield getattr(found, "__func__", found)
