"""launch/train_small: the task is what it says, training learns and repeats itself, and what it trains is served."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from nvfp4_sgl.cache.layout import PAGE_TOKENS
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tokenizer import build_tokenizer
from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from small_model import task, training
from small_model.export import write_checkpoint
from small_model.network import ALL_ENTRIES, SIZES, SmallModel, raw_config

STEPS, INTERRUPTED_AT = 20, 12


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_character_of_a_document_is_one_token() -> None:
    document = task.training_document(random.Random(1), 512, 48)
    assert build_tokenizer(task.VOCABULARY).encode(document.text).ids == document.ids
    assert len(document.text) == 512


def test_answers_stand_in_facts() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        near, far = task.training_document(rng, 256, 20), task.far_document(rng, 512, 40, 12)
        for document in (near, far):
            assert document.answers
            for place in document.answers:
                key, value = document.text[place - 1], document.text[place]
                fact = document.text.index(f"{key}={value};")
                assert fact % task.GROUP == 0 and fact < place
                assert document.text.count(f"{key}=") == 1, "no key gets two values"
                assert document is near or place - fact > task.GAP
        assert len({far.text[place - 1] for place in far.answers}) == 12, "an earlier answer would be near"


def test_a_document_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="240 tokens: expected 12 to 8 keys, found 40"):
        task.far_document(random.Random(0), 240, 40, 12)


def test_phases_cover_a_run() -> None:
    assert sum(phase.share for phase in training.PHASES) == pytest.approx(1)
    phases = [training.phase_of(step, 1000) for step in range(1000)]
    assert list(dict.fromkeys(phases)) == list(training.PHASES)
    assert phases[-1].sparse and phases[-1].window == 128 == raw_config()["sliding_window"]
    assert phases[-1].tokens // 4 > SIZES["index_topk"], "selection must leave something out"


@pytest.fixture(scope="module")
def trained() -> tuple[training.Training, list[float]]:
    """A run of 20 steps, and the loss of each."""
    run = training.Training(seed=0, steps=400)
    return run, [progress.losses.total().item() for progress in run.run(until=STEPS)]


def test_training_learns(trained: tuple[training.Training, list[float]]) -> None:
    run, losses = trained
    assert run.done == STEPS
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_a_resumed_run_is_the_same(trained: tuple[training.Training, list[float]], tmp_path: Path) -> None:
    """Same seed, same numbers; and an interruption changes none."""
    _, expected = trained
    first = training.Training(seed=0, steps=400)
    losses = [progress.losses.total().item() for progress in first.run(until=INTERRUPTED_AT)]
    first.save(tmp_path / "state.pt")
    second = training.Training.resume(tmp_path / "state.pt", seed=0, steps=400)
    losses += [progress.losses.total().item() for progress in second.run(until=STEPS)]
    assert losses == expected
    with pytest.raises(ValueError, match="expected a run with --seed 1, found 0; use another --output"):
        training.Training.resume(tmp_path / "state.pt", seed=1, steps=400)


def test_every_parameter_learns(trained: tuple[training.Training, list[float]]) -> None:
    """Parameters of every mechanism have gradients, the indexer's and the MTP block's too."""
    run, _ = trained
    state = run.optimizer.state
    still = {
        name for name, value in run.model.named_parameters() if not state[value].get("exp_avg", torch.zeros(1)).any()
    }
    # 32 tokens make no entry of ratio 128.
    assert {name for name in still if ".layers.2.self_attn.compressor." not in name} == set()


def test_what_is_trained_is_what_is_served(trained: tuple[training.Training, list[float]], tmp_path: Path) -> None:
    """The checkpoint, in our decoder, has the logits of the network that was trained, with its weights in BF16."""
    run, _ = trained
    write_checkpoint(run.model, tmp_path / "bf16")
    rounded = SmallModel(raw_config(), seed=1)
    state = {
        name: value.bfloat16().float() if value.is_floating_point() else value
        for name, value in run.model.state_dict().items()
    }
    exact = ("_hc.", "hc_head", "sinks", "position_bias", "e_score_correction_bias")
    state |= {name: value for name, value in run.model.state_dict().items() if any(part in name for part in exact)}
    rounded.load_state_dict(state)
    rounded.set_topk(SIZES["index_topk"])
    document = task.far_document(random.Random(3), 384, 30, 10)
    with torch.no_grad():
        expected = rounded(torch.tensor([document.ids])).logits[0]
    found = Standalone(tmp_path / "bf16", requests=1, capacity=2 * PAGE_TOKENS).extend({0: document.ids})[0]
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()


@torch.no_grad()
def test_attention_in_blocks_is_that_of_transformers() -> None:
    model = SmallModel(raw_config(), seed=2)
    ids = torch.tensor([task.training_document(random.Random(i), 300, 20).ids for i in range(2)])
    for topk in (SIZES["index_topk"], ALL_ENTRIES):
        model.set_topk(topk)
        model.config._attn_implementation = "small_model"
        ours = model(ids).logits
        model.config._attn_implementation = "eager"
        theirs = model.decoder(ids, use_cache=False).logits
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
