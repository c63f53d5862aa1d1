"""Names of modules as ``quantization_config`` writes them: lists, wildcards, regular expressions.

A matrix has three names: the original one, that behind ``model.``, and transformers'; a pattern that fits one of them
fits the matrix.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from fnmatch import translate
from functools import cache

from nvfp4_sgl.checkpoint.transformers_names import PREFIX, transformers_name

ALL_LINEAR = "Linear"
"""The class of every matrix, which exporters may name as a target."""
REGULAR = "re:"
"""Begins a regular expression of compressed-tensors, which must fit from the name's beginning."""


@cache
def names_of(stem: str) -> tuple[str, ...]:
    """The names of a matrix."""
    theirs = transformers_name(stem)
    return (stem, f"{PREFIX}{stem}", *((theirs,) if theirs else ()))


def modules_around(stem: str) -> Iterator[str]:
    """Every name of a matrix and of the modules that it is part of: ``a.b.c``, ``a.b``, ``a``."""
    for name in names_of(stem):
        while name:
            yield name
            name = name.rpartition(".")[0]


class Names:
    """Names of matrices or of modules around them."""

    def __init__(self, names: Collection[str]):
        self._names = frozenset(names)
        self._modules = {"": False}
        """Whether a module is named or in one that is: Pro's 71,000 matrices are in a third as many."""

    def fit(self, stem: str) -> bool:
        """Whether one of them is the matrix ``stem`` or a module around it."""
        return any(name in self._names or self._has(name.rpartition(".")[0]) for name in names_of(stem))

    def _has(self, module: str) -> bool:
        if module not in self._modules:
            self._modules[module] = module in self._names or self._has(module.rpartition(".")[0])
        return self._modules[module]


class Wildcards:
    """ModelOpt's patterns: names of matrices or of modules around them, with ``*``, ``?`` and ``[…]``."""

    def __init__(self, patterns: Collection[str]):
        wild = [pattern for pattern in patterns if re.search(r"[*?\[]", pattern)]
        self._exact = Names(set(patterns).difference(wild))
        self._wild = re.compile("|".join(translate(pattern) for pattern in wild)) if wild else None
        self._known: dict[str, bool] = {}
        """By matrix: several statements ask about each."""

    def fit(self, stem: str) -> bool:
        """Whether one of them fits the matrix ``stem``."""
        if stem not in self._known:
            self._known[stem] = self._exact.fit(stem) or self._has_wild(stem)
        return self._known[stem]

    def _has_wild(self, stem: str) -> bool:
        return self._wild is not None and any(self._wild.match(name) for name in names_of(stem))


class Targets:
    """compressed-tensors' patterns: names in full, ``re:`` with a regular expression, or the class ``Linear``.

    Raises:
        re.error: an invalid regular expression.
    """

    def __init__(self, patterns: Collection[str]):
        self._exact = {pattern for pattern in patterns if not pattern.startswith(REGULAR)}
        regular = [pattern.removeprefix(REGULAR) for pattern in patterns if pattern.startswith(REGULAR)]
        self._regular = [re.compile(pattern) for pattern in regular]

    def fit(self, stem: str) -> bool:
        """Whether one of them fits the matrix ``stem``."""
        if ALL_LINEAR in self._exact or any(name in self._exact for name in names_of(stem)):
            return True
        return any(pattern.match(name) for pattern in self._regular for name in names_of(stem))
