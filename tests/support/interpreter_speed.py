"""Triton's interpreter without the work that it repeats; values stay what they are.

What Triton 3.8.0 repeats, and what is left out here. A decoder of three layers (``tests/gpu/test_decoder.py -k
sm_90a-w4a16``) takes 28.8 and 31.9 s with it, 11.7 and 13.6 s without, in turns on an idle CPU (2026-11-25):

* Each call of a device function replaces the functions of ``triton.language`` anew, by listing all members of its
  modules, though the launch has done so already. It is left out for modules that the launch at work has replaced.
* Each conversion of a type builds the table of all types. What it gives is kept.
* Each sum or product of integers is computed again in int64 and compared, by twelve interpreted operations whose result
  is used only where the interpreter debugs, which it does not. They are left out.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np


def install() -> None:
    """Patch the interpreter of this process; again is fine."""
    from triton.runtime import interpreter

    if hasattr(interpreter, "_repeats_no_work"):
        return
    interpreter._repeats_no_work = True
    _replace_once_a_launch(interpreter)
    _keep_types(interpreter)
    _skip_overflow(interpreter)


def _replace_once_a_launch(interpreter: Any) -> None:
    import triton.language as tl

    patch_lang, call = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: list[Any] = []
    """Modules whose functions the launch at work has replaced."""
    named: dict[int, tuple[dict[str, Any], list[Any]]] = {}
    """By the identity of a function's globals, which are kept: the modules of the language that they name."""

    def modules(names: dict[str, Any]) -> list[Any]:
        if id(names) not in named:
            found = [value for value in names.values() if inspect.ismodule(value)]
            named[id(names)] = names, [module for module in (tl, tl.core) if module in found]
        return named[id(names)][1]

    def patch_once(fn: Any) -> Any:
        needed = modules(fn.__globals__)
        if needed and all(module in replaced for module in needed):
            return None
        replaced.extend(needed)
        return patch_lang(fn)

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            call(self, *args, **kwargs)
        finally:
            replaced.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch


def _keep_types(interpreter: Any) -> None:
    convert, known = interpreter._get_np_dtype, {}

    def converted(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in known:
            known[name] = convert(dtype)
        found: np.dtype = known[name]
        return found

    interpreter._get_np_dtype = converted


def _skip_overflow(interpreter: Any) -> None:
    semantic = type(interpreter.interpreter_semantic)
    check = semantic.binary_op_sanitize_overflow_impl

    def checked(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            check(self, lhs, rhs, binary_op)

    semantic.binary_op_sanitize_overflow_impl = checked
