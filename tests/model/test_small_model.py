"""The trained model in examples/small_model: it recalls what only compressed entries hold, in every mode.

The bounds are those of launch/results/small_model.md, with room for the few documents here. A toy says nothing of
DeepSeek's own weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.targets.requirements import check_target
from nvfp4_sgl.targets.target import words
from tests.packaging.checkout import ROOT
from tests.support.mutation import mutated
from tests.support.oracle import hf_logits, hf_model

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from small_model import measure
from small_model.task import CHANCE, MEASURED_TOKENS, Document

CHECKPOINT = ROOT / "examples" / "small_model"
MAX_BYTES = 8_000_000
DOCUMENTS = measure.far_documents(4)
ACCURACY = {ActivationMode.W4A16: 0.9, ActivationMode.W4A4: 0.9}
LOSS = {ActivationMode.W4A16: 0.4, ActivationMode.W4A4: 0.4}
NEAR_CHANCE = 0.3
"""Above what 48 guesses give with a probability of 1 in 10,000."""


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < MAX_BYTES


@pytest.mark.parametrize("target", words())
def test_every_target_takes_it(target: str) -> None:
    verified = verify(CHECKPOINT)
    check_target(target, verified.config, 1, verified.reader(torch.device("cpu")).storage)


@pytest.fixture(scope="module")
def logprobs() -> dict[ActivationMode, list[Tensor]]:
    """What our CPU decoder says of the documents, in each mode."""
    return {mode: measure.evaluate(CHECKPOINT, DOCUMENTS, mode=mode)[1] for mode in ActivationMode}


def figures(logprobs: Sequence[Tensor], documents: Sequence[Document] = DOCUMENTS) -> measure.Figures:
    return measure.figures(logprobs, documents, None)


@pytest.mark.parametrize("mode", ActivationMode)
def test_it_recalls(logprobs: dict[ActivationMode, list[Tensor]], mode: ActivationMode) -> None:
    found = figures(logprobs[mode])
    assert found.accuracy.value >= ACCURACY[mode]
    assert found.loss.value <= LOSS[mode]


def test_packed_rows_recall_too() -> None:
    found, _ = measure.evaluate(CHECKPOINT, DOCUMENTS, mode=ActivationMode.W4A4, packed=True, dtype=torch.bfloat16)
    assert found.accuracy.value >= ACCURACY[ActivationMode.W4A4]


def test_it_says_what_transformers_says(logprobs: dict[ActivationMode, list[Tensor]]) -> None:
    """On the dequantised weights, in fp32."""
    expected = hf_logits(hf_model(CHECKPOINT), DOCUMENTS[0].ids).log_softmax(-1)
    likely = expected > -10
    assert (logprobs[ActivationMode.W4A16][0] - expected)[likely].abs().max() < 1e-2


def test_without_compressed_entries_it_guesses() -> None:
    with measure.without_entries(LayerKind.CSA, LayerKind.HCA):
        found, _ = measure.evaluate(CHECKPOINT, DOCUMENTS)
    assert found.accuracy.value <= NEAR_CHANCE
    assert abs(found.accuracy.value - CHANCE) < 0.2


MISTAKES = {
    "channels of the previous window and of the current one swapped": (
        "ops.compressor",
        "all_kv[previous, :size], all_kv[current, size:]",
        "all_kv[previous, size:], all_kv[current, :size]",
    ),
    "gates of the other half": (
        "ops.compressor",
        "all_score[previous, :size], all_score[current, size:]",
        "all_score[previous, size:], all_score[current, :size]",
    ),
    "the worst entries are selected": (
        "ops.indexer",
        "topk(min(topk, count), dim=-1, sorted=False)",
        "topk(min(topk, count), dim=-1, largest=False, sorted=False)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_costs_answers(logprobs: dict[ActivationMode, list[Tensor]], mistake: str) -> None:
    with mutated(*MISTAKES[mistake]):
        from nvfp4_sgl.standalone import Standalone

        wrong = measure.log_probabilities(Standalone(CHECKPOINT, requests=1, capacity=MEASURED_TOKENS), DOCUMENTS)
    right = figures(logprobs[ActivationMode.W4A16]).accuracy.value
    assert figures(wrong).accuracy.value <= right - 0.3
