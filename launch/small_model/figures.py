"""Figures of the small model, in every storage that this project makes of it."""

from __future__ import annotations

import contextlib
import datetime
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from nvfp4_sgl.checkpoint.classes import MatrixClass
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.convert.options import Options
from nvfp4_sgl.convert.run import convert
from nvfp4_sgl.ops.modes import ActivationMode
from small_model.export import WEIGHTS
from small_model.measure import Figures, Mean, evaluate, far_documents, without_entries
from small_model.task import CHANCE, GAP, MEASURED_KEYS, MEASURED_QUESTIONS, MEASURED_TOKENS, Document

TOY = (
    "This is a toy of {parameters:.1f} million parameters on a task of its own. Its figures show that the code"
    " computes what it should and how large rounding is beside noise in it; they say nothing of DeepSeek's own weights."
)
ORDER = (*MatrixClass,)
"""In which classes are added for the cumulated rows."""
W4A16, W4A4 = ActivationMode.W4A16, ActivationMode.W4A4


def report(checkpoint: Path, documents: int) -> Iterator[str]:
    """Lines of the report on the BF16 checkpoint, as they are measured."""
    chosen = far_documents(documents)
    yield from head(checkpoint, chosen)
    with tempfile.TemporaryDirectory() as folder:
        yield from rows(checkpoint, chosen, Path(folder))


def head(checkpoint: Path, documents: list[Document]) -> Iterator[str]:
    """The report's first lines."""
    tensors = load_file(checkpoint / WEIGHTS).values()
    parameters = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
    yield f"Measured on {datetime.date.today()} with `launch/measure_small DIR/bf16`, on a CPU."
    yield ""
    yield TOY.format(parameters=parameters / 1e6)
    yield ""
    yield f"{len(documents)} documents of {MEASURED_TOKENS} tokens with {MEASURED_KEYS} facts and {MEASURED_QUESTIONS}"
    yield f"questions, every fact at least {GAP} tokens before its question: outside the window of 128. Guessing gives"
    yield f"{CHANCE:.0%} right answers."
    yield "Means over documents, ± half of a 95 % interval. KL: nats a token, from the BF16 weights computed in fp32."
    yield ""
    yield "| weights | activations | loss of answers, nats | right answers | KL, all tokens | KL, answers |"
    yield "| --- | --- | --- | --- | --- | --- |"


def rows(plain: Path, documents: list[Document], folder: Path) -> Iterator[str]:
    """One row of the table for each variant, as it is measured."""
    figures, reference = evaluate(plain, documents)
    yield row("BF16", "fp32: the reference", figures)
    with without_entries(LayerKind.CSA, LayerKind.HCA):
        yield row("BF16, all compressed entries hidden", "fp32", evaluate(plain, documents, reference)[0])
    for kind in (LayerKind.CSA, LayerKind.HCA):
        with without_entries(kind):
            text = f"BF16, entries of ratio {kind.value} hidden"
            yield row(text, "fp32", evaluate(plain, documents, reference)[0])
    bf16: dict[str, Any] = {"dtype": torch.bfloat16}
    yield row("BF16 (noise floor)", "bf16", evaluate(plain, documents, reference, **bf16)[0])
    yield row("BF16 (noise floor)", "bf16, packed rows", evaluate(plain, documents, reference, packed=True, **bf16)[0])
    for kind in ORDER:
        yield converted(plain, documents, reference, folder, [kind], f"NVFP4: {kind.value} alone")
    for count in range(2, len(ORDER)):
        name = f"NVFP4: {ORDER[0].value} to {ORDER[count - 1].value}"
        yield converted(plain, documents, reference, folder, ORDER[:count], name)
    full = convert_to(plain, folder / "full", ORDER)
    for mode in (W4A16, W4A4):
        yield row("full NVFP4", f"{mode.value}, fp32", evaluate(full, documents, reference, mode=mode)[0])
        yield row("full NVFP4", f"{mode.value}, bf16", evaluate(full, documents, reference, mode=mode, **bf16)[0])
        packed = evaluate(full, documents, reference, mode=mode, packed=True, **bf16)[0]
        yield row("full NVFP4", f"{mode.value}, bf16, packed rows", packed)


def converted(
    plain: Path, documents: list[Document], reference: list[Tensor], folder: Path, kinds: Any, name: str
) -> str:
    """The row of a checkpoint with these classes in NVFP4."""
    target = convert_to(plain, folder / "-".join(kind.value for kind in kinds), kinds)
    cells = [evaluate(target, documents, reference, mode=mode)[0] for mode in (W4A16, W4A4)]
    return "\n".join(row(name, mode.value, cell) for mode, cell in zip((W4A16, W4A4), cells, strict=True))


def convert_to(plain: Path, target: Path, kinds: Any) -> Path:
    """``plain`` with matrices of these classes in NVFP4."""
    with contextlib.redirect_stdout(io.StringIO()):
        convert(plain, target, Options(classes=frozenset(kinds)), device=torch.device("cpu"))
    return target


def row(weights: str, activations: str, figures: Figures) -> str:
    def cell(mean: Mean | None, percent: bool = False) -> str:
        if mean is None:
            return ""
        if percent:
            return f"{100 * mean.value:.1f} ± {100 * mean.margin:.1f} %"
        return f"{mean.value:.3g} ± {mean.margin:.2g}"

    values = [cell(figures.loss), cell(figures.accuracy, percent=True), cell(figures.kl), cell(figures.answer_kl)]
    return f"| {weights} | {activations} | {' | '.join(values)} |"
