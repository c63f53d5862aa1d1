"""Triton's interpreter without the work that it repeats; values stay what they are.

Nearly all of the time of Triton 3.8.0's interpreter goes to its front end, not to NumPy: what types a sum has, how its
operands are broadcast, which of the builder's operations that takes. All of it follows from types and constants alone.
A decoder of three layers (``tests/gpu/test_decoder.py -k "sm_90a-w4a16 and prefill"``) takes 17.2 s without what
follows and 2.9 s with it, on an idle CPU (2026-11-25):

* Each call of a builtin of ``triton.language`` is recorded: the builder's operations, and which operand each one takes.
  A call with operands of the same types and the same constants repeats these operations (:class:`Recording`).
* A launch lists the members of ``triton.language`` that it replaces, and so does each call of a device function. They
  are listed once, and only a launch replaces them.
* What a type says of its tensors (shape, count, element) and of NumPy is kept with the type.
* Each sum or product of integers is computed again in int64 and compared, by twelve interpreted operations whose result
  is used only where the interpreter debugs, which it does not. They are left out.
* bf16 is the upper half of fp32 but for subnormal numbers, which alone are converted field by field.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

CONSTANT = frozenset(
    f"create_{name}"
    for name in ("splat", "make_range", "fp_trunc", "fp_ext", "fp_to_fp", "int_cast", "si_to_fp", "ui_to_fp")
)
"""Operations of the builder, beside all named ``get_``, that give the same for the same constants at any time."""

MAX_RECORDINGS = 100_000
"""How many recordings are kept before all are dropped: constants such as a loop's index are part of what a recording is
found by, so that there is no end to them."""


def install() -> None:
    """Patch the interpreter of this process; again is fine."""
    from triton.runtime import interpreter

    if hasattr(interpreter, "_repeats_no_work"):
        return
    interpreter._repeats_no_work = True
    _replace_once_a_launch(interpreter)
    _keep_types(interpreter)
    _skip_overflow(interpreter)
    _convert_bf16_by_halves(interpreter)
    _keep_shapes()
    _record_calls(interpreter)


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


def _convert_bf16_by_halves(interpreter: Any) -> None:
    import triton.language as tl

    convert, nearest = interpreter._convert_float, interpreter._ir.ROUNDING_MODE.RTNE

    def converted(given: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (source, target) not in ((tl.bfloat16, tl.float32), (tl.float32, tl.bfloat16)):
            return convert(given, source, target, rounding)
        bits = np.asarray(given).view(np.uint16 if source == tl.bfloat16 else np.uint32)
        mantissa = np.array((1 << source.fp_mantissa_width) - 1, bits.dtype)
        exponent = np.array(255 << source.fp_mantissa_width, bits.dtype)
        if np.count_nonzero((bits & exponent == 0) & (bits & mantissa != 0)):
            return convert(given, source, target, rounding)
        if target == tl.float32:
            return np.asarray(bits.astype(np.uint32) << np.uint32(16))
        upper = (bits >> np.uint32(16)).astype(np.uint16)
        if rounding == nearest:  # as the interpreter does: a carry of the mantissa is or-ed to the exponent
            raised = (upper & np.uint16(127)) + (bits >> np.uint32(15) & np.uint32(1)).astype(np.uint16)
            upper = upper & np.uint16(0xFF80) | raised
        return np.asarray(upper)

    interpreter._convert_float = converted


def _keep_shapes() -> None:
    from triton.language import core

    def initialise(self: Any, handle: Any, type: Any) -> None:
        try:
            shape, numel, element = type.kept_shape
        except AttributeError:
            sizes = type.shape if type.is_block() else ()
            shape = core.tuple([core.constexpr(size) for size in sizes])
            numel, element = core.constexpr(math.prod(sizes)), type.scalar
            type.kept_shape = shape, numel, element
        self.handle, self.type, self.shape, self.numel, self.dtype = handle, type, shape, numel, element

    core.tensor.__init__ = initialise


class Recording:
    """Stands in for the builder while a call runs, and writes down what the call asks of it.

    A recording becomes a function of the builder and the operands' handles. Its source names constants by their place
    in a list, so that calls of one form share their code.
    """

    codes: ClassVar[dict[str, Any]] = {}
    """What makes a function of its constants, by its source."""

    def __init__(self, builder: Any, handle: type, operands: list[Any]) -> None:
        self._builder = builder
        self._handle = handle
        self._lines: list[str] = []
        self._constants: list[Any] = []
        self._kept = list(operands)  # so that no identity is given out again
        self._names = {id(operand): f"h[{i}]" for i, operand in enumerate(operands)}
        self._whole = True

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._builder, name)
        if not name.startswith(("create_", "get_")):
            return member

        def recorded(*args: Any, **kwargs: Any) -> Any:
            given = member(*args, **kwargs)
            operands = [a for a in (*args, *kwargs.values()) if isinstance(a, self._handle)]
            if (name.startswith("get_") or name in CONSTANT) and not any(id(o) in self._names for o in operands):
                return given  # a constant, too: its value is named where it is used
            written = [self._name(a) for a in args] + [f"{key}={self._name(a)}" for key, a in kwargs.items()]
            line = f"b.{name}({', '.join(written)})"
            outputs = given if isinstance(given, tuple) else (given,)
            if all(isinstance(output, self._handle) for output in outputs):
                names = [f"r{len(self._kept) + i}" for i in range(len(outputs))]
                self._names |= {id(output): name for output, name in zip(outputs, names, strict=True)}
                self._kept.extend(outputs)
                line = f"{', '.join(names)} = {line}"
            elif given is not None:
                self._whole = False
            self._lines.append(line)
            return given

        return recorded

    def _name(self, value: Any) -> str:
        """What stands for an operand, an earlier result, or a constant."""
        if id(value) in self._names:
            return self._names[id(value)]
        if isinstance(value, list | tuple) and any(isinstance(v, self._handle) for v in value):
            self._whole = False
        self._constants.append(value)
        return f"c[{len(self._constants) - 1}]"

    def function(self, result: Any, tensor: Any, sequence: Any) -> Callable[[Any, list[Any]], Any] | None:
        """What repeats the call, whose result is a tensor, a sequence of tensors, or None; None if nothing does."""

        def written(value: Any) -> str:
            if isinstance(value, tensor):
                return f"tensor({self._name(value.handle)}, {self._name(value.type)})"
            if value.__class__ is tuple:
                return f"({''.join(f'{written(v)}, ' for v in value)})"
            if value.__class__ is sequence:
                return f"sequence([{', '.join(written(v) for v in value.values)}], {self._name(value.type)})"
            self._whole = self._whole and value is None
            return "None"

        lines = [*self._lines, f"return {written(result)}"]
        if not self._whole:
            return None
        source = "\n".join(("def bind(c, tensor, sequence):", " def repeat(b, h):", *(f"  {line}" for line in lines)))
        source += "\n return repeat\n"
        if source not in self.codes:
            names: dict[str, Any] = {}
            exec(source, names)  # names and numbers alone, written above
            self.codes[source] = names["bind"]
        function: Callable[[Any, list[Any]], Any] = self.codes[source](self._constants, tensor, sequence)
        return function


UNKNOWN = object()
"""What stands for no recording yet."""


class Unknown(Exception):
    """A call has an operand that is neither a tensor nor a known kind of constant."""


class Signature:
    """What a recording is found by: types of tensors, and all else by value."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._types: dict[Any, int] = {}

    def of_type(self, given: Any) -> int:
        """A number, the same for types that are alike; kept with the type."""
        core = self._core
        try:
            number: int = given.kept_number
        except AttributeError:
            if isinstance(given, core.block_type):
                key: Any = self.of_type(given.element_ty), given.shape
            elif isinstance(given, core.pointer_type):
                key = self.of_type(given.element_ty), given.address_space, given.const, "pointer"
            elif isinstance(given, core.dtype):
                key = given.name
            else:
                raise Unknown from None
            number = given.kept_number = self._types.setdefault(key, len(self._types))
        return number

    def of(self, value: Any, operands: list[Any]) -> Any:
        """The value's part of a key; the handles of its tensors are added to the operands."""
        core, kind = self._core, value.__class__
        if kind is core.tensor:
            operands.append(value.handle)
            return self.of_type(value.type)
        if kind is int or kind is bool or kind is str or value is None:
            return kind, value
        if kind is float:
            return kind, value.hex()  # tells -0.0 from 0.0, and finds NaN again
        if kind is core.constexpr:
            return kind, self.of(value.value, operands)
        if kind is tuple or kind is list:
            return kind, *[self.of(v, operands) for v in value]
        if kind is core.tuple:
            return kind, value.type.fields and tuple(value.type.fields), *[self.of(v, operands) for v in value.values]
        if kind is slice:
            return kind, *[self.of(v, operands) for v in (value.start, value.stop, value.step)]
        if isinstance(value, core.dtype):
            return "type", self.of_type(value)
        raise Unknown

    def renewed(self, value: Any, handles: Iterator[Any]) -> Any:
        """The value with the next of the handles in each of its tensors."""
        core, kind = self._core, value.__class__
        if kind is core.tensor:
            return core.tensor(next(handles), value.type)
        if kind is tuple or kind is list:
            return kind(self.renewed(v, handles) for v in value)
        if kind is core.tuple:
            return core.tuple([self.renewed(v, handles) for v in value.values], value.type)
        return value


def _record_calls(interpreter: Any) -> None:
    from triton.language import core

    semantic, builder, handle = (
        interpreter.interpreter_semantic,
        interpreter.interpreter_builder,
        interpreter.TensorHandle,
    )
    signature, tensor = Signature(core), core.tensor
    recordings: dict[Any, Any] = {}
    """What repeats a call, None where nothing does."""

    def record(key: Any, member: Any, operands: list[Any], args: Any, kwargs: Any) -> Any:
        # Each operand gets a handle of its own: what is one tensor twice here may be two elsewhere.
        copies = [handle(h.data, h.dtype, h.attr) for h in operands]
        handles = iter(copies)
        args = [signature.renewed(value, handles) for value in args]
        kwargs = {name: signature.renewed(value, handles) for name, value in kwargs.items()}
        semantic.builder = recording = Recording(builder, handle, copies)
        try:
            result = member(*args, _semantic=semantic, **kwargs)
        finally:
            semantic.builder = builder
        if len(recordings) >= MAX_RECORDINGS:
            recordings.clear()
        recordings[key] = recording.function(result, core.tensor, core.tuple)
        return result

    def recording_member(member: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("_semantic", None)
            if semantic.builder is not builder:  # within a call that is being recorded
                return member(*args, _semantic=semantic, **kwargs)
            operands: list[Any] = []
            parts: list[Any] = [member]
            try:
                for value in args:
                    if value.__class__ is tensor:  # most are
                        operands.append(value.handle)
                        kind = value.type
                        parts.append(kind.kept_number if hasattr(kind, "kept_number") else signature.of_type(kind))
                    else:
                        parts.append(signature.of(value, operands))
                for name, value in kwargs.items():
                    parts.append((name, signature.of(value, operands)))
            except Unknown:
                return member(*args, _semantic=semantic, **kwargs)
            key = tuple(parts)
            repeat = recordings.get(key, UNKNOWN)
            if repeat is UNKNOWN:
                return record(key, member, operands, args, kwargs)
            if repeat is None:
                return member(*args, _semantic=semantic, **kwargs)
            return repeat(builder, operands)

        return call

    members: dict[int, list[tuple[str, Any]]] = {}
    """What launches put in place of builtins, by the identity of the module or class that has them."""

    def patch_builtin(module: Any, builder: Any, scope: Any) -> None:
        if id(module) not in members:
            found = [(name, m) for name, m in inspect.getmembers(module) if core.is_builtin(m)]
            members[id(module)] = [(name, recording_member(member)) for name, member in found]
        for name, member in members[id(module)]:
            scope.set_attr(module, name, member)

    interpreter._patch_builtin = patch_builtin
