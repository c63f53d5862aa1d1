"""The glossary of docs/how_it_works.md: few words, in order, each defined where it says."""

from __future__ import annotations

import ast

import pytest

from tests.packaging.checkout import KERNEL_FOLDERS, ROOT, sources
from tests.support.definitions import fault, named
from tests.support.documents import table

MOST = 25
"""Words: as many as a reader takes in at once; a longer list is a reason to call fewer things by words of our own."""
GLOSSARY = table((ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8"), "glossary")


def test_the_glossary_is_short_and_in_order() -> None:
    words = [row[0] for row in GLOSSARY]
    assert 0 < len(words) <= MOST
    assert words == sorted(set(words), key=str.casefold)


@pytest.mark.parametrize("row", GLOSSARY, ids=[row[0] for row in GLOSSARY])
def test_a_word_has_one_line_and_is_defined_where_it_says(row: list[str]) -> None:
    _, meaning, where = row
    assert len(meaning.split()) <= 20 and "." not in meaning
    ((file, symbol),) = named(where)
    assert fault(file, symbol) is None


@pytest.mark.parametrize(
    ("file", "symbol"),
    [
        ("nvfp4_sgl/no_such_file.py", "Form"),
        ("nvfp4_sgl/model/contract.py", "NoSuchForm"),
        ("nvfp4_sgl/model/contract.py", "Form.NVFP5"),
        ("docs/how_it_works.md", "No such heading"),
    ],
)
def test_what_is_not_defined_is_seen(file: str, symbol: str) -> None:
    assert fault(file, symbol) is not None


@pytest.mark.parametrize(
    ("file", "symbol"),
    [
        ("nvfp4_sgl/model/contract.py", "Form.NVFP4"),
        ("nvfp4_sgl/model/contract.py", "Activation.rows"),
        ("nvfp4_sgl/targets/target.py", "HOPPER"),
        ("docs/how_it_works.md", "Glossary"),
    ],
)
def test_what_is_defined_is_found(file: str, symbol: str) -> None:
    assert fault(file, symbol) is None


ONE_MEANING = {
    "operand": {"Operands", "ExpertOperands", "GemmOperands", "OperandLoad"},  # what a GEMM or an operator takes
    "product": set(),  # a GEMM is called GEMM
    "plan": {
        "Plan",
        "BatchPlan",
        "CompressPlan",
        "Planner",
        "FusedPlanner",
        "GemmPlanner",
        "ReferencePlanner",
    },  # slots
    "shape": {"GemmShape", "KernelShape"},  # the tiling of a GEMM's kernel
    "site": {"Site", "SiteNames", "SiteState", "FusedSite", "ReferenceSite"},  # hyper-connection and RMSNorm
    "kind": {"LayerKind", "PassKind", "DraftKind", "Kind"},  # a closed set
}
"""Classes that have the word in their names, each of which means by it what is said here."""
ERRORS = {"OperandError", "OperandTypeError", "OperandValueError"}
OPERATORS = {"product", "grouped_product"}
"""Operations have the names of ``torch.ops``, which stay."""


def classes() -> list[str]:
    """Names of classes in the package and in the kernels."""
    files = [file for folder in ("nvfp4_sgl", *KERNEL_FOLDERS) for file in sources(ROOT / folder)]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def closed_sets() -> set[str]:
    """Names of the ``Literal`` types in the package and in the kernels."""
    files = [file for folder in ("nvfp4_sgl", *KERNEL_FOLDERS) for file in sources(ROOT / folder)]
    found = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    return {
        ast.unparse(node.targets[0])
        for node in found
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal[")
    }


def test_a_kind_is_not_called_as_what_is_of_it() -> None:
    """Operands and weights are tensors; "nvfp4" is a kind of them."""
    assert {"OperandKind", "BlockScaledKind", "WeightKind"} <= closed_sets()
    assert closed_sets().isdisjoint(classes())


@pytest.mark.parametrize("word", ONE_MEANING)
def test_a_word_means_one_thing_in_names_of_classes(word: str) -> None:
    found = {name for name in classes() if word in name.casefold()} - ERRORS
    assert found == ONE_MEANING[word]


def test_gemms_are_not_called_products() -> None:
    """But by operators, and their checks and reports; what multiplies two numbers is a product."""
    files = [*sources(ROOT / "nvfp4_sgl" / "targets"), *sources(ROOT / "cutedsl_kernels")]
    functions = {
        node.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and "product" in node.name
    }
    assert functions == OPERATORS
