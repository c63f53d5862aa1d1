"""Words of Python sources: docstrings, comments and messages, and which rules of :mod:`.prose` they break."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support import prose

LITERAL = re.compile(r"``[^`]+``|:\w+:`[^`]+`")
GEMM_PRODUCT = re.compile(
    r"\b(?:plain|dense|grouped|merged|matrix|NVFP4|experts'|layer's|model's) products?\b", re.IGNORECASE
)
"""In code a product may be one of numbers, which its rounding is told of."""
SAYS_NOTHING = re.compile(
    r"(?:It|There|Here|Because|If|When|Since|Also|And|But|So|Then|How|What|Where|Which|Who|Whose|That which)\b"
)
"""Beginnings of a first line that does not say what the thing is or does: it begins with a noun or a verb."""
LITERAL_BLOCK = re.compile(r"(?:\n    .*)+")
COMMENT = re.compile(r"#.*(?:\n[ \t]*#.*)*")
CONVERSION = re.compile(r"%[-+ #0-9.]*[a-zA-Z]")
END = re.compile(r"[.:?!)]$|::$")


@dataclass(frozen=True)
class Fault:
    """A rule that a docstring or an error's text breaks, and the line where that begins."""

    line: int
    rule: str


def faults(source: str, tree: ast.Module | None = None) -> Iterator[Fault]:
    """Every fault of a module's docstrings, comments and other strings, such as errors and lines of the log."""
    for kind, line, text in texts(tree or ast.parse(source)):
        yield from (Fault(line, rule) for rule in RULES[kind](text))
    for match in COMMENT.finditer(source):
        text = " ".join(match[0].replace("#", " ").split())
        yield from (Fault(source[: match.start()].count("\n") + 1, rule) for rule in house_words(text))


def texts(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """(kind, line, text) of every string, strings that are joined being one."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        first = body[0] if isinstance(body := getattr(node, "body", None), list) and body else None
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                if isinstance(child.value.value, str):
                    yield "docstring" if child is first else "documentation", child.lineno, child.value.value
            elif isinstance(child, ast.expr) and (text := literal(child)):
                yield "message", child.lineno, text
            elif not isinstance(child, ast.Name | ast.expr_context | ast.operator):
                pending.append(child)


def docstring_faults(text: str) -> Iterator[str]:
    """A first line that does not say what the thing is or does, or is too long; faults of the body."""
    text = inspect.cleandoc(text)
    plain = LITERAL.sub(prose.CODE, text)
    first = " ".join(plain.partition("\n\n")[0].split())
    if SAYS_NOTHING.match(first):
        yield f"first line: expected what the thing is or does, found {first.split()[0]!r}"
    if not END.search(first):
        yield "first line: expected a full stop at the end of its paragraph"
    yield from (f"first line: {fault}" for fault in long_sentences(next(prose.split([(1, first)])).text))
    yield from body_faults(text)


def body_faults(text: str) -> Iterator[str]:
    """House words, and more figures in a sentence than a table would have in a row; literal blocks are left out."""
    plain = LITERAL.sub(prose.CODE, text)
    yield from house_words(plain)
    for block in LITERAL_BLOCK.sub("", plain).split("\n\n"):
        for sentence in prose.split([(1, block)]):
            if sentence.figures > prose.MOST_FIGURES:
                yield f"at most {prose.MOST_FIGURES} figures a sentence, found {sentence.figures}: {sentence.text[:60]}"


def house_words(text: str) -> Iterator[str]:
    """House words, products of numbers left out."""
    return prose.house_words(
        text if GEMM_PRODUCT.search(text) else re.sub(prose.PRODUCT, "", text, flags=re.IGNORECASE)
    )


def message_faults(text: str) -> Iterator[str]:
    """A sentence of a message that is too long, and house words; rows of a table are no sentences."""
    for line in text.splitlines():
        if not line.startswith("|"):
            yield from (f"message: {fault}" for fault in long_sentences(prose.INLINE.sub(prose.CODE, line)))
    yield from (f"message: {fault}" for fault in house_words(text))


RULES = {"docstring": docstring_faults, "documentation": body_faults, "message": message_faults}


def long_sentences(text: str) -> Iterator[str]:
    for sentence in prose.split([(1, text)]):
        if sentence.words > prose.MOST_WORDS:
            yield f"at most {prose.MOST_WORDS} words a sentence, found {sentence.words}"


def literal(node: ast.expr) -> str:
    """The text of strings that are joined, a word standing for each value filled in; empty for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else prose.CODE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return CONVERSION.sub(prose.CODE, literal(node.left))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [literal(part) for part in (node.left, node.right)]
        return "".join(part or prose.CODE for part in parts) if any(parts) else ""
    return ""
