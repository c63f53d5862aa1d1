"""The whole decoder, run alone, against transformers on the same dequantised weights."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.synthetic.tiny_config import TinyFormat
from tests.support.full import but_for
from tests.support.oracle import hf_model
from tests.support.packed_oracle import pack_rows

FORMATS = tuple(format.value for format in TinyFormat)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    paths = {name: tmp_path_factory.mktemp(name) for name in FORMATS}
    for name, path in paths.items():
        write_tiny(path, name, seed=11)
    return paths


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(2, 500, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids[None]).logits[0].log_softmax(-1)


def run(model: Standalone, ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    model.reset()
    return torch.cat([model.extend({2: part.tolist()})[2] for part in ids.split(chunks)]).log_softmax(-1)


@pytest.mark.parametrize("name", but_for(FORMATS, "compressed-tensors", "deepseek-base"))
def test_logprobs_in_one_pass_and_in_chunks(name, checkpoints):
    ids = tokens(700, seed=1)
    expected = reference(hf_model(checkpoints[name]), ids)
    model = Standalone(checkpoints[name], capacity=1024)
    assert expected.max(-1).values.exp().median() > 0.3, "greedy comparison needs peaked distributions"
    for chunks in ([700], [127, 1, 1, 127, 256, 188], [512, 3, 1, 1, 1, 1, 1, 1, 1, 178], [1] * 12 + [688]):
        ours = run(model, ids, chunks)
        assert (ours - expected).abs().max().item() <= 1e-4
        assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_requests_do_not_disturb_each_other(checkpoints):
    """Eight sequences of ragged lengths in mixed batches give what each gives alone."""
    model = Standalone(checkpoints["nvfp4-full"], requests=8, capacity=512)
    generator = torch.Generator().manual_seed(2)
    sequences = {r: tokens(int(n), seed=r) for r, n in enumerate((1, 3, 4, 127, 128, 129, 300, 411))}
    expected = {}
    for request, ids in sequences.items():
        model.reset()
        expected[request] = model.extend({request: ids.tolist()})[request].log_softmax(-1)
    model.reset()
    done = dict.fromkeys(sequences, 0)
    parts: dict[int, list[torch.Tensor]] = {r: [] for r in sequences}
    while any(done[r] < len(ids) for r, ids in sequences.items()):
        batch = {}
        for request in torch.randperm(8, generator=generator).tolist():
            left = len(sequences[request]) - done[request]
            count = min(left, int(torch.randint(1, 90, (1,), generator=generator)))
            if count:
                batch[request] = sequences[request][done[request] : done[request] + count].tolist()
                done[request] += count
        for request, logits in model.extend(batch).items():
            parts[request].append(logits)
    for request, pieces in parts.items():
        assert (torch.cat(pieces).log_softmax(-1) - expected[request]).abs().max().item() <= 1e-4


def test_packed_rows_against_a_reference_that_rounds_alike(checkpoints):
    ids = tokens(600, seed=3)
    exact = hf_model(checkpoints["nvfp4-full"])
    unrounded = reference(exact, ids)
    expected = reference(pack_rows(exact), ids)
    model = Standalone(checkpoints["nvfp4-full"], packed=True, capacity=1024)
    errors = [(run(model, ids, chunks) - expected).abs() for chunks in ([600], [127, 1, 2, 300, 170])]
    effect = (unrounded - expected).abs()
    for error in errors:
        # A value on a rounding boundary may fall to either side; that is rare, and small against the rounding itself.
        assert error.amax(-1).median().item() <= 0.05 * effect.amax(-1).median().item()
        assert error.mean().item() <= 0.05 * effect.mean().item()


def test_w4a4_moves_logprobs_but_not_much(checkpoints):
    """The quantised products themselves are checked against NumPy; here: the mode reaches every NVFP4 product."""
    ids = tokens(200, seed=4)
    exact = run(Standalone(checkpoints["nvfp4-full"], capacity=256), ids, [200])
    quantised = run(Standalone(checkpoints["nvfp4-full"], capacity=256, mode=ActivationMode.W4A4), ids, [200])
    assert torch.isfinite(quantised).all()
    assert (quantised - exact).abs().mean().item() > 1e-2
    plain = Standalone(checkpoints["bf16"], capacity=256)
    plain_w4a4 = Standalone(checkpoints["bf16"], capacity=256, mode=ActivationMode.W4A4)
    assert torch.equal(run(plain, ids, [200]), run(plain_w4a4, ids, [200]))


def test_bfloat16_is_close(checkpoints):
    ids = tokens(200, seed=5)
    expected = reference(hf_model(checkpoints["nvfp4-full"]), ids)
    ours = run(Standalone(checkpoints["nvfp4-full"], capacity=256, dtype=torch.bfloat16), ids, [128, 72])
    assert torch.isfinite(ours).all()
    assert (ours.argmax(-1) == expected.argmax(-1)).float().mean().item() >= 0.8
