"""Imports inside functions: a closed list, each with its reason. All others stand at the top of their file."""

from __future__ import annotations

import ast

import pytest

from tests.packaging.checkout import ROOT
from tests.packaging.test_import_circles import modules, run_imports

MOST = 30
"""Imports inside functions. A further one takes the place of another, or of a dependency that is wrong."""

HELP = "help and argument errors are answered without torch, which takes seconds to import"
HEADERS = "headers are read without torch, which takes seconds to import"
LIBRARY = "a server loads compiled kernels without CuTeDSL, which takes seconds to import"
BROKEN = "an exception while SGLang's entry points are imported would be swallowed; here it ends the process"
LATE_IMPORTS = {
    "nvfp4_sgl/build_cli.py": {"nvfp4_sgl.build": HELP},
    "nvfp4_sgl/checkpoint/values.py": {"nvfp4_sgl.checkpoint": HEADERS},
    "nvfp4_sgl/checkpoint/verified.py": {"nvfp4_sgl.checkpoint.reader": HEADERS},
    "nvfp4_sgl/convert/cli.py": {"nvfp4_sgl.convert.run": HELP},
    "nvfp4_sgl/doctor.py": {"torch": HELP, "nvfp4_sgl.memory": HELP},
    "nvfp4_sgl/plugin.py": {
        "nvfp4_sgl.serving": BROKEN,
        "nvfp4_sgl.serving.sglang.ledger": BROKEN,
        "nvfp4_sgl.serving.platform": "it derives from SGLang's classes, so the version is checked before",
        "nvfp4_sgl.serving.registration": BROKEN,
        "torch": BROKEN,
    },
    "nvfp4_sgl/process_exit.py": {"nvfp4_sgl": "what failed may be the package itself"},
    "nvfp4_sgl/reports/inspect_cli.py": {"nvfp4_sgl.checkpoint.scan": HEADERS},
    "nvfp4_sgl/reports/verify_cli.py": {"nvfp4_sgl.reports": HELP},
    "nvfp4_sgl/serving/metrics.py": {"prometheus_client": "it reads at import where SGLang's processes share values"},
    "nvfp4_sgl/serving/registration.py": {"nvfp4_sgl.serving.scheduler_start": "only a scheduler loads the model"},
    "nvfp4_sgl/synthetic/random_weights.py": {"nvfp4_sgl.synthetic.dummy": HEADERS},
    "nvfp4_sgl/synthetic/tiny_cli.py": {"nvfp4_sgl.synthetic": HELP},
    "nvfp4_sgl/targets/choose.py": {"torch": HELP},
    "nvfp4_sgl/targets/fused/compile_worker.py": {"cutlass.cute": "CuTeDSL's library is loaded before"},
    "nvfp4_sgl/tracing/layer_cli.py": {"torch": HELP, "nvfp4_sgl.tracing.layer": HELP},
    "nvfp4_sgl/tracing/trace_cli.py": {"nvfp4_sgl.tracing.runs": HELP},
    "nvfp4_sgl/weights/source.py": {"torch": "GEMMs are listed without torch, which takes seconds to import"},
    "cutedsl_kernels/common/native.py": {"cuda.bindings": "for the words of an error alone"},
    "cutedsl_kernels/compiled.py": {"": LIBRARY},
    "cutedsl_kernels/library.py": {"cutlass.cute.runtime": LIBRARY, "torch": "launches on a given device need none"},
    "cutedsl_kernels/occupancy.py": {"cuda.bindings": "asked once, when a plan first needs it"},
}
"""By file, what is imported from inside a function, and why; a relative import of the own package is ``""``."""


def late_imports(source: str) -> list[str]:
    """What ``source`` imports from inside functions, in the order of its lines."""
    found = []
    for node, inside in run_imports(ast.parse(source)):
        if inside:
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return found


def test_late_imports_are_those_listed() -> None:
    found = {str(file.relative_to(ROOT)): late_imports(file.read_text()) for file in modules().values()}
    assert len(found) > 100
    listed = {file: sorted(reasons) for file, reasons in LATE_IMPORTS.items()}
    assert {file: sorted({*names}) for file, names in found.items() if names} == listed
    assert sum(map(len, found.values())) <= MOST


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a\ndef f():\n    import b, c", ["b", "c"]),
        ("class C:\n    import a\n    async def f(self):\n        from b.c import d", ["b.c"]),
        ("def f():\n    if TYPE_CHECKING:\n        import a\n    else:\n        import b", ["b"]),
        ("if TYPE_CHECKING:\n    import a\ntry:\n    import b\nexcept ImportError:\n    pass", []),
        ("def f():\n    def g():\n        from . import a", [""]),
    ],
)
def test_late_imports_are_seen(source: str, expected: list[str]) -> None:
    assert late_imports(source) == expected
