"""Words of Python sources: docstrings and texts of errors, and which rules of :mod:`.prose` they break."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support import prose

LITERAL = re.compile(r"``[^`]+``|:\w+:`[^`]+`")
GEMM_PRODUCT = re.compile(r"\b(?:plain|dense|grouped|merged|matrix|NVFP4|experts'|layer's|model's) products?\b")
"""In code a product may be one of numbers, which its rounding is told of."""
SAYS_NOTHING = re.compile(r"(?:It|There|Here|Because|If|When|Since|Also|And|But|So|Then)\b")
"""How a first line begins that does not say what the thing is or does."""
END = re.compile(r"[.:?!)]$|::$")


@dataclass(frozen=True)
class Fault:
    """A rule that a docstring or an error's text breaks, and the line where that begins."""

    line: int
    rule: str


def faults(source: str) -> Iterator[Fault]:
    """Every fault of a module's docstrings and of the errors that it raises."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                line = node.body[0].lineno
                yield from (Fault(line, rule) for rule in docstring_faults(text))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                yield from (Fault(node.lineno, rule) for rule in error_faults(literal(argument)))


def docstring_faults(text: str) -> Iterator[str]:
    """A first line that does not say what the thing is or does, or is too long; house words anywhere."""
    plain = LITERAL.sub(prose.CODE, text)
    first = " ".join(plain.partition("\n\n")[0].split())
    if SAYS_NOTHING.match(first):
        yield f"first line: expected what the thing is or does, found {first.split()[0]!r}"
    if not END.search(first):
        yield "first line: expected a full stop at the end of its paragraph"
    yield from (f"first line: {fault}" for fault in long_sentences(next(prose.split([(1, first)])).text))
    yield from house_words(plain)


def house_words(text: str) -> Iterator[str]:
    """House words, products of numbers left out."""
    return prose.house_words(
        text if GEMM_PRODUCT.search(text) else re.sub(prose.PRODUCT, "", text, flags=re.IGNORECASE)
    )


def error_faults(text: str) -> Iterator[str]:
    """A sentence of an error's text that is too long, and house words."""
    yield from (f"error: {fault}" for fault in long_sentences(text))
    yield from (f"error: {fault}" for fault in house_words(text))


def long_sentences(text: str) -> Iterator[str]:
    for sentence in prose.split([(1, text)]):
        if sentence.words > prose.MOST_WORDS:
            yield f"at most {prose.MOST_WORDS} words a sentence, found {sentence.words}"


def literal(node: ast.expr) -> str:
    """The text of a string, a word standing for each value that is filled in; empty for other expressions."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else prose.CODE for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
