"""Pages of the API reference, made from the docstrings of the public modules; ``docs_hook.py`` adds them to the site.

Sources are parsed and never imported, so a page needs neither torch nor a GPU. A page shows each module of
:data:`PAGES` with its docstring, then its public classes, functions and documented constants in the order of the file.
Names that begin with an underscore and device functions (``triton.jit``) are left out.

mkdocstrings would do the same, but it renders docstrings as Markdown. Ours use the roles, tables and ``::`` blocks of
reStructuredText, and sections of their own (Rounding, Source).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_SIGNATURE = 100
"""Longest signature on one line."""


@dataclass(frozen=True)
class Page:
    """One page of the reference.

    Attributes:
        title: of the page. opening: what the modules are for, and where to read on.
        modules: their names below ``nvfp4_sgl``.
    """

    title: str
    opening: str
    modules: tuple[str, ...]


PAGES = {
    "boundaries": Page(
        "Boundaries and targets",
        "The types between the model and a target. [How to add a target](../add_a_target.md) uses them.",
        ("model.contract", "targets.target", "targets.choose", "ops.modes"),
    ),
    "standalone": Page(
        "The model without a server",
        "`Standalone` runs a checkpoint from Python: tokens in, logits out. [Examples](../examples.md) use it.",
        ("standalone", "synthetic.tiny", "errors"),
    ),
    "formats": Page(
        "Formats",
        "The exact number formats in plain torch. [Formats](../formats.md) says which checkpoints hold them.",
        (
            "formats.nvfp4",
            "formats.e2m1",
            "formats.e4m3",
            "formats.ue8m0",
            "formats.mxfp4",
            "formats.mxfp8",
            "formats.fp8_block",
            "formats.rows",
            "formats.scale_layout",
            "formats.kv_entry",
            "formats.index_entry",
            "formats.least_error",
        ),
    ),
    "ops": Page(
        "Reference ops",
        "One torch reference for each op of the model. Kernels are compared with them.",
        (
            "ops.norm",
            "ops.rope",
            "ops.linear",
            "ops.swiglu",
            "ops.moe",
            "ops.attention",
            "ops.compressor",
            "ops.indexer",
            "ops.hyper_connection",
            "ops.drafts",
            "ops.greedy",
        ),
    ),
    "gemms": Page(
        "GEMMs",
        "CuTeDSL GEMMs by weight and activation. [The tutorial](../hopper_gemm_tutorial.md) explains Hopper's kernel.",
        (
            "cutedsl_kernels.w4a16.operations",
            "cutedsl_kernels.w4a16.operand",
            "cutedsl_kernels.w8a16.operations",
            "cutedsl_kernels.w8a16.operand",
            "cutedsl_kernels.w4a4.operations",
            "cutedsl_kernels.w4a4.operand",
            "cutedsl_kernels.mxfp8.operations",
            "cutedsl_kernels.mxfp8.operand",
        ),
    ),
    "triton_kernels": Page(
        "Triton kernels",
        "The ops that Triton kernels compute. [How to add a kernel](../own_kernel.md) shows how one is written.",
        (
            "triton_kernels.attention.sparse_attention",
            "triton_kernels.attention_inputs.prepare",
            "triton_kernels.attention_inputs.compressor",
            "triton_kernels.attention_inputs.latent",
            "triton_kernels.indexer.query",
            "triton_kernels.indexer.scores",
            "triton_kernels.indexer.topk",
            "triton_kernels.hyper_connection.site",
            "triton_kernels.hyper_connection.streams",
            "triton_kernels.experts.router_logits",
            "triton_kernels.experts.routing",
            "triton_kernels.experts.permutation",
            "triton_kernels.experts.swiglu",
            "triton_kernels.experts.rounded_swiglu",
            "triton_kernels.experts.finalize",
            "triton_kernels.quantize.quantize",
            "triton_kernels.quantize.mxfp8",
            "triton_kernels.quantize.rounded",
            "triton_kernels.quantize.scatter",
            "triton_kernels.entries.kv_entry",
            "triton_kernels.entries.index_entry",
            "triton_kernels.plan.resolve",
            "triton_kernels.plan.relay",
            "triton_kernels.logits.greedy",
            "triton_kernels.logits.accept",
        ),
    ),
}
"""The pages by file name, in the order of the menu."""

SECTIONS = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Raises": "Raises",
    "Returns": "Returns",
    "Rounding": "Rounding",
    "Limits": "Limits",
    "Source": "Source",
}
"""Headings of docstrings and what a page calls them."""
_SECTION = re.compile(rf"({'|'.join(SECTIONS)}):(?: (.*))?")
_ROLE = re.compile(r":\w+:`([^`]+)`")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def pages() -> dict[str, str]:
    """Markdown of each page by file name.

    Raises:
        FileNotFoundError: a module of :data:`PAGES` is not there.
    """
    anchors = {
        f"{module}.{name}": f"{file}.md#{module}.{name}"
        for file, page in PAGES.items()
        for module in page.modules
        for name, _ in _members(_parse(module))
    }
    return {file: _page(page, anchors) for file, page in PAGES.items()}


def undocumented() -> list[str]:
    """Public functions and classes on the pages that have no docstring."""
    return [
        f"nvfp4_sgl.{module}.{name}"
        for page in PAGES.values()
        for module in page.modules
        for name, node in _members(_parse(module))
        if isinstance(node, Definition) and not ast.get_docstring(node)
    ]


def _parse(module: str) -> ast.Module:
    return ast.parse((ROOT / "nvfp4_sgl" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))


def _members(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Public definitions, and constants that a docstring follows."""
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, Definition):
            if not node.name.startswith("_") and not any("jit" in ast.unparse(each) for each in node.decorator_list):
                yield node.name, node
        elif (name := _assigned(node)) and not name.startswith("_") and _string(following) is not None:
            yield name, node


def _assigned(node: ast.stmt) -> str | None:
    """The single name that an assignment binds."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def _string(node: ast.stmt | None) -> str | None:
    """The text of a string that stands as a statement."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None


def _page(page: Page, anchors: dict[str, str]) -> str:
    parts = [f"# {page.title}", page.opening]
    for module in page.modules:
        tree = _parse(module)
        text = _Text(module, anchors)
        # The menu beside a page is narrow: the heading has the end of the name.
        parts += [f"## `{'.'.join(module.split('.')[-2:])}` {{ #{module} }}", f"Module `nvfp4_sgl.{module}`."]
        parts.append(text.markdown(ast.get_docstring(tree) or ""))
        following = dict(zip(tree.body, tree.body[1:], strict=False))
        for name, node in _members(tree):
            parts.append(f"### `{name}` {{ #{module}.{name} }}")
            if isinstance(node, Definition):
                parts += [_fence(_signature(node)), text.markdown(ast.get_docstring(node) or "")]
                if isinstance(node, ast.ClassDef):
                    parts += [_fields(node, text), *_methods(node, text)]
            else:
                value = ast.unparse(node)
                if len(value) <= MAX_SIGNATURE:
                    parts.append(_fence(value))
                parts.append(text.markdown(_clean(_string(following[node]) or "")))
    return "\n\n".join(part for part in parts if part) + "\n"


def _fields(node: ast.ClassDef, text: _Text) -> str:
    """Fields and members of a class that a docstring follows."""
    return "\n".join(
        f"- `{name}`: {text.markdown(' '.join(documentation.split()))}"
        for each, following in zip(node.body, node.body[1:], strict=False)
        if (name := _assigned(each)) and (documentation := _string(following))
    )


def _methods(node: ast.ClassDef, text: _Text) -> Iterator[str]:
    for each in node.body:
        if not isinstance(each, ast.FunctionDef) or each.name.startswith("_"):
            continue
        if documentation := ast.get_docstring(each):
            yield f"#### `{node.name}.{each.name}` {{ #{text.module}.{node.name}.{each.name} }}"
            yield _fence(_signature(each))
            yield text.markdown(documentation)


def _signature(node: Definition) -> str:
    """The line, or lines, with which a caller begins: a function's arguments, a class's fields or constructor."""
    decorators = "".join(
        f"@{name}\n" for each in node.decorator_list if (name := ast.unparse(each)).partition("(")[0] in SHOWN
    )
    if isinstance(node, ast.ClassDef):
        bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
        constructor = next(
            (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None
        )
        if constructor is not None:
            return decorators + _call(f"class {node.name}", constructor, skipped=1)
        fields = [f"    {ast.unparse(each)}" for each in node.body if isinstance(each, ast.AnnAssign) or _member(each)]
        return decorators + "\n".join([f"class {node.name}{bases}:", *(fields or ["    ..."])])
    return decorators + _call(f"def {node.name}", node, skipped=0)


SHOWN = ("property", "classmethod", "staticmethod", "functools.cached_property", "dataclass", "enum.unique")
"""Decorators that change how a caller writes the call, as far as they are written out."""


def _member(node: ast.stmt) -> bool:
    """Whether this is a member of an enumeration."""
    return isinstance(node, ast.Assign) and (_assigned(node) or "_").isupper()


def _call(head: str, node: ast.FunctionDef | ast.AsyncFunctionDef, skipped: int) -> str:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    shown = [_argument(each, default) for each, default in zip(positional, defaults, strict=True)][skipped:]
    if arguments.vararg:
        shown.append(f"*{_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [
        _argument(each, default) for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        shown.append(f"**{_argument(arguments.kwarg, None)}")
    result = f" -> {ast.unparse(node.returns)}" if node.returns and not head.startswith("class") else ""
    line = f"{head}({', '.join(shown)}){result}"
    if len(line) <= MAX_SIGNATURE:
        return line
    return "\n".join([f"{head}(", *(f"    {each}," for each in shown), f"){result}"])


def _argument(node: ast.arg, default: ast.expr | None) -> str:
    text = f"{node.arg}: {ast.unparse(node.annotation)}" if node.annotation else node.arg
    if default is None:
        return text
    return f"{text}{' = ' if node.annotation else '='}{ast.unparse(default)}"


def _fence(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"


def _clean(text: str) -> str:
    """A constant's docstring without the indentation of its later lines."""
    return ast.get_docstring(ast.Module([ast.Expr(ast.Constant(text))], [])) or ""


@dataclass(frozen=True)
class _Text:
    """Docstrings of one module as Markdown.

    Attributes:
        module: its name. anchors: address of each name of the reference.
    """

    module: str
    anchors: dict[str, str]

    def markdown(self, text: str) -> str:
        parts: list[str] = []
        lines = text.splitlines()
        at = 0
        while at < len(lines):
            end = at + 1
            if match := _SECTION.fullmatch(lines[at]):
                while end < len(lines) and (not lines[end] or lines[end].startswith(" ") or bool(match[2])):
                    if match[2] and not lines[end]:
                        break
                    end += 1
                parts.append(self._section(SECTIONS[match[1]], match[2] or "", lines[at + 1 : end]))
            elif lines[at].startswith("=="):
                while end < len(lines) and lines[end]:
                    end += 1
                table = "\n".join(lines[at:end])
                parts.append(_fence(_ROLE.sub(lambda role: role[1].split(".")[-1], table), "text"))
            elif lines[at].startswith("    "):
                while end < len(lines) and (not lines[end] or lines[end].startswith("    ")):
                    end += 1
                parts.append(_fence("\n".join(line[4:] for line in lines[at:end]).strip("\n"), "text"))
            else:
                parts.append(self._inline(re.sub(r"::$", ":", lines[at])))
                at += 1
                continue
            parts[-1] = f"\n{parts[-1]}\n"
            at = end
        return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).strip()

    def _section(self, title: str, first: str, lines: list[str]) -> str:
        if first or title not in ("Arguments", "Attributes", "Raises"):
            return f"**{title}**: {self._inline(' '.join([first, *map(str.strip, lines)]).strip())}"
        entries: list[str] = []
        indent = min(len(line) - len(line.lstrip()) for line in lines if line)
        for line in filter(None, lines):
            if len(line) - len(line.lstrip()) == indent:
                entries.append(line.strip())
            else:
                entries[-1] += f" {line.strip()}"
        items = [re.sub(r"^([\w, *]+?): ", r"`\1`: ", self._inline(entry)) for entry in entries]
        return "\n".join([f"**{title}**", "", *(f"- {item}" for item in items)])

    def _inline(self, text: str) -> str:
        """``text`` with its roles as links to this reference, or as code."""
        return _ROLE.sub(lambda role: self._link(role[1]), text)

    def _link(self, target: str) -> str:
        shown = target.lstrip("~.").split(".")[-1] if target.startswith("~") else target.lstrip(".")
        name = target.lstrip("~.").removeprefix("nvfp4_sgl.")
        for candidate in (name, f"{self.module}.{name}", *(key for key in self.anchors if key.endswith(f".{name}"))):
            if candidate in self.anchors:
                return f"[`{shown}`]({self.anchors[candidate]})"
        return f"`{shown}`"
