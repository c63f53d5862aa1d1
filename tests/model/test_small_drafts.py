"""launch/train_small's drafts: training computes what servers compute, learns, and leaves the target as it is."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nvfp4_sgl.checkpoint import checksums
from nvfp4_sgl.checkpoint.drafts import DraftKind
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import read_config_json
from nvfp4_sgl.formats.nvfp4 import quantize_weight
from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from small_model import acceptance, draft_training, drafts, export, target, task
from small_model.guessing import Bundled, Lookup, Target
from small_model.network import SmallModel

CHECKPOINT = ROOT / "examples" / "small_model"
RAW = read_config_json(CHECKPOINT)
TOKENS = 150
"""More than a window."""
SIZES = draft_training.Sizes(written=2, batch=2, tokens=48, anchors=4)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def frozen() -> SmallModel:
    return target.load_target(CHECKPOINT, torch.device("cpu"))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[drafts.Drafts, dict[DraftKind, Path]]:
    """Random drafts, and the checkpoints that bundle them."""
    folder = tmp_path_factory.mktemp("bundles")
    model = drafts.Drafts(RAW, seed=3)
    with torch.no_grad():
        for value in model.parameters():  # a bias, a norm or a sink that is left out must show
            value.add_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel())))
    files = export.save_drafts(model, RAW, folder)
    named = export.mtp_tensors(model.mtp), export.dspark_tensors(model.dspark)
    for tensors, file in zip(named, files.values(), strict=True):
        for name, stored in load_file(file).items():
            tensors[name].copy_(stored)  # in the precision that is stored
    for kind, file in files.items():
        export.bundle(CHECKPOINT, file, kind, folder / kind.name)
    return model, {kind: folder / kind.name for kind in files}


class Heard(Target):
    """A target that keeps the logits that its head gave."""

    def __init__(self, directory: Path):
        super().__init__(verify(directory), 256)
        self.heard: list[Tensor] = []
        head = self.model.logits
        self.model.logits = lambda hidden: self.heard.append(head(hidden)) or self.heard[-1]  # type: ignore[method-assign,func-returns-value]


@pytest.mark.parametrize("length", [3, 131])
@pytest.mark.parametrize("kind", list(DraftKind))
@torch.no_grad()
def test_training_computes_what_servers_compute(
    bundles: tuple[drafts.Drafts, dict[DraftKind, Path]], frozen: SmallModel, kind: DraftKind, length: int
) -> None:
    """At one position of a text, whose window is full or not: every guess has the logits of the modules that serve."""
    model, folders = bundles
    ids = task.training_document(random.Random(1), TOKENS + 2, 20).ids[:TOKENS]
    decoder = Heard(folders[kind])
    draft = Bundled(decoder, verify(folders[kind]), drafts.STEPS)
    _, streams = decoder.read(ids[:length])
    half = length // 2  # in two passes, as rounds come
    draft.guess([each[:half] for each in streams], ids[1 : half + 1])
    decoder.heard.clear()
    guesses = draft.guess([each[half:] for each in streams], ids[half + 1 : length + 1])

    table = frozen.decoder.model.embed_tokens.weight
    text = torch.tensor([[*ids[: length + 1], *guesses, *ids][:TOKENS]])
    read = frozen(torch.tensor([ids])).streams
    drafted = model(read, table[text], table[drafts.NOISE_TOKEN], torch.tensor([[length - 1]]))
    if kind is DraftKind.MTP:
        found = torch.stack([hidden[0, length - 1] for hidden in drafted.chain])
        expected = torch.cat([logits[-1:] for logits in decoder.heard])
    else:
        found, expected = drafted.block[0, 0], decoder.heard[-1]
    assert (frozen.decoder.lm_head(found) - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert len(guesses) == len(expected)


def test_bundling_leaves_the_target_as_it_is(bundles: tuple[drafts.Drafts, dict[DraftKind, Path]]) -> None:
    sums = checksums.read(CHECKPOINT)
    for folder in bundles[1].values():
        assert checksums.check(verify(folder).inventory) == []
        found = checksums.read(folder)
        assert {name: value for name, value in found.items() if not name.startswith("mtp.")} == {
            name: value for name, value in sums.items() if not name.startswith("mtp.")
        }


def test_rounding_is_that_of_convert() -> None:
    w = (
        torch.randn(3, 128, 64, generator=torch.Generator().manual_seed(2))
        * torch.tensor([1.0, 1e-3, 30])[:, None, None]
    )
    expected = quantize_weight(w).dequantize()
    torch.testing.assert_close(drafts.round_to_nvfp4(w), expected, rtol=1e-6, atol=0)
    halves = [quantize_weight(half).dequantize() for half in w.chunk(2, 1)]
    torch.testing.assert_close(drafts.rounded("experts.gate_up_proj", w), torch.cat(halves, 1), rtol=1e-6, atol=0)
    names = {name for name, _ in drafts.Drafts(RAW, 0).named_parameters() if drafts.is_matrix(name)}
    assert len(names) == 4 * 10 + 3  # attention 5, experts 2, the shared one 3; e_proj, h_proj, main_proj


def test_texts_end_as_the_target_answers(frozen: SmallModel) -> None:
    texts = target.texts(frozen, random.Random(4), 2, 96)
    decoder = Target(verify(CHECKPOINT), 256)
    for ids, start in zip(texts.ids.tolist(), texts.starts.tolist(), strict=True):
        decoder.model.reset()
        logits, _ = decoder.read(ids)
        assert logits[start - 1 : -1].argmax(-1).tolist() == ids[start:]


def test_drafts_learn_and_a_resumed_run_is_the_same(frozen: SmallModel, tmp_path: Path) -> None:
    def run() -> draft_training.DraftTraining:
        return draft_training.DraftTraining(frozen, RAW, seed=0, steps=6, sizes=SIZES)

    whole, part, rest = run(), run(), run()
    losses = [(step.mtp, step.dspark) for step in whole.run()]
    first = [(step.mtp, step.dspark) for step in [next(going) for going in [part.run()] for _ in range(SIZES.steps)]]
    part.save(tmp_path / "drafts.pt")
    rest.resume(tmp_path / "drafts.pt")
    assert first + [(step.mtp, step.dspark) for step in rest.run()] == losses
    assert len(losses) == 6 and all(last < 0.8 * before for before, last in zip(losses[0], losses[-1], strict=True))
    with pytest.raises(ValueError, match="expected steps 9, found 6; use another --output"):
        draft_training.DraftTraining(frozen, RAW, 0, 9, SIZES).resume(tmp_path / "drafts.pt")


class Planted:
    """Guesses what is known to follow, but in the places that are wrong."""

    def __init__(self, text: Sequence[int], wrong: int | None):
        self.text, self.wrong, self.length = text, wrong, 0

    def reset(self) -> None:
        self.length = 0

    def guess(self, streams: list[Tensor], tokens: Sequence[int]) -> list[int]:
        assert all(len(each) == len(tokens) for each in streams)
        self.length += len(tokens)
        assert list(tokens) == list(self.text[self.length - len(tokens) + 1 : self.length + 1])
        found = list(self.text[self.length + 1 : self.length + 4])
        if self.wrong is not None:
            found[self.wrong] += 1
        return found


@pytest.mark.parametrize(("wrong", "a_round"), [(None, 4), (2, 3), (1, 2), (0, 1)])
def test_rounds_count_what_is_accepted(wrong: int | None, a_round: int) -> None:
    document = task.training_document(random.Random(5), 96, 8)
    decoder, counts = Target(verify(CHECKPOINT), 256), acceptance.Counts()
    acceptance.rounds(decoder, Planted([*document.ids, *[0] * 8], wrong), document.ids[:64], document.ids[64:], counts)
    assert counts.tokens == a_round * counts.rounds >= 24
    assert all(right == guessed for place, (right, guessed) in counts.places.items() if place != wrong)
    assert wrong is None or counts.places[wrong][0] == 0


def test_lookup_repeats_what_followed() -> None:
    lookup = Lookup(5)
    assert lookup.guess([], [7, 8, 9, 1, 7, 8]) == [9, 1, 7, 8, 9]
    assert lookup.guess([], [3]) == [0] * 5
