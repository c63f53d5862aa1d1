"""Single mistakes move the logits: each mutation of the decoder must be seen by the comparison with transformers.

The mistakes are those of the fingerprint table of the specification (section 13.1), dropped state writes among
them, planted one at a time into the source. Sequences are cut into a prefill, chunks and single steps, so that
what persists between passes matters. The few mistakes that hide below the end-to-end bound are looked for where
they show: in the mixing matrix itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch

from tests.support.mutation import mutated
from tests.support.oracle import hf_model

TOKENS = 300
PAGE = 256
CHUNKS = (131, 1, 1, 2, 120, 1, 3, 41)
BOUND = 1e-4
"""Largest difference of a log-probability (over the whole vocabulary) that is not a mistake."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from nvfp4_sgl.synthetic.tiny import write_tiny

    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=5, sliding_window=16, index_topk=16)
    return path


@pytest.fixture(scope="module")
def ids():
    return torch.randint(2, 500, (TOKENS,), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def expected(checkpoint, ids):
    with torch.no_grad():
        whole = hf_model(checkpoint)(ids[None]).logits[0].log_softmax(-1)
    return torch.cat([whole, whole, whole[PAGE:]])


def passes(checkpoint, ids) -> Iterator[torch.Tensor]:
    """Log-probabilities of the package as it is imported right now: in chunks, at once, behind a cached page."""
    standalone = importlib.import_module("nvfp4_sgl.standalone")
    model = standalone.Standalone(checkpoint, requests=4, capacity=512)
    for chunk in ids.split(CHUNKS):
        # A second sequence runs along, so that rings and slots of different requests can be confused.
        result = model.extend({1: (chunk + 1).tolist(), 0: chunk.tolist()})
        yield result[0].log_softmax(-1)
    # One pass over a page's edge, whose page another sequence then begins with.
    yield model.extend({2: ids.tolist()})[2].log_softmax(-1)
    model.share_prefix(2, 3, pages=1)
    yield model.extend({3: ids[PAGE:].tolist()})[3].log_softmax(-1)


def test_unmutated_model_agrees(checkpoint, ids, expected):
    ours = torch.cat(list(passes(checkpoint, ids)))
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max().item() <= BOUND
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


ROPE, HC, MOE = "ops.rope", "ops.hyper_connection", "ops.moe"
ATTENTION, COMPRESSOR, INDEXER, PLAN = "ops.attention", "ops.compressor", "ops.indexer", "cache.plan"
CONFIG, TABLES = "config", "model.rope_tables"
CORE = "targets.reference.attention"

MISTAKES = {
    "rope not applied": (ROPE, "    pairs *= ", "    _ = pairs * "),
    "rope half-split": (
        ROPE,
        "    pairs *= (turns.conj() if inverse else turns).view(x.shape[0], *([1] * (x.dim() - 2)), -1)\n",
        "    turns = (turns.conj() if inverse else turns).view(x.shape[0], *([1] * (x.dim() - 2)), -1)\n"
        "    low, high = x[..., -2 * frequencies.numel() :].chunk(2, -1)\n"
        "    both = torch.complex(low, high) * turns\n"
        "    x[..., -2 * frequencies.numel() :] = torch.cat((both.real, both.imag), -1)\n",
    ),
    "rope on the first dimensions": (
        ROPE,
        "x[..., -2 * frequencies.numel() :].unflatten",
        "x[..., : 2 * frequencies.numel()].unflatten",
    ),
    "no inverse rope": (CORE, "o = apply_rope(o, step.positions, self._frequencies, inverse=True)", "o = o"),
    "inverse rope forwards": (CORE, "inverse=True", "inverse=False"),
    "main theta in compressed layers": (CONFIG, "RopeTable.COMPRESSED if", "RopeTable.WINDOW if"),
    "no YaRN in compressed layers": (
        TABLES,
        "config.compress_rope_theta, config.yarn",
        "config.compress_rope_theta, None",
    ),
    "compress table in SWA layers": (CONFIG, "else RopeTable.WINDOW", "else RopeTable.COMPRESSED"),
    "entry rope at the window's last token": (
        COMPRESSOR,
        "plan.window_positions,",
        "plan.window_positions + plan.ratio - 1,",
    ),
    "entry rope at the window's index": (COMPRESSOR, "plan.window_positions,", "plan.window_positions // plan.ratio,"),
    "ratio-4 entries visible one query late": (PLAN, "csa_visible=(positions + 1) // 4", "csa_visible=positions // 4"),
    "ratio-128 entries visible one query late": (PLAN, "(positions[:, None] + 1) // 128", "positions[:, None] // 128"),
    "Ca and Cb swapped": (
        COMPRESSOR,
        "all_kv[previous, :size], all_kv[current, size:]",
        "all_kv[previous, size:], all_kv[current, :size]",
    ),
    "Ca and Cb scores swapped": (
        COMPRESSOR,
        "all_score[previous, :size], all_score[current, size:]",
        "all_score[previous, size:], all_score[current, :size]",
    ),
    "no overlap rows": (
        COMPRESSOR,
        "rows[:, : plan.ratio], rows",
        "torch.full_like(rows[:, :4], len(all_kv) - 1), rows",
    ),
    "ape omitted": (COMPRESSOR, "all_score += ape", "_ = ape"),
    "ratio-4 state not written": (
        COMPRESSOR,
        "    state[plan.write_rows]",
        "    (state if plan.ratio == 128 else state.clone())[plan.write_rows]",
    ),
    "ratio-128 state not written": (
        COMPRESSOR,
        "    state[plan.write_rows]",
        "    (state if plan.ratio == 4 else state.clone())[plan.write_rows]",
    ),
    "state written before the history is read": (
        COMPRESSOR,
        "    history = state[plan.history_rows].float()\n    _write_state(kv, score, state, plan)",
        "    _write_state(kv, score, state, plan)\n    history = state[plan.history_rows].float()",
    ),
    "the ring's tail of full pages not kept": (
        PLAN,
        "        horizon = torch.minimum((positions // PAGE_TOKENS + 1) * PAGE_TOKENS, horizon)",
        "        pass",
    ),
    "HCA's entries halved": (PLAN, "batch.ends // 4, batch.ends // 128", "batch.ends // 4, batch.ends // 256"),
    "window one short": (
        PLAN,
        "_masked(swa_slots, back >= 0)",
        "_masked(swa_slots, (back >= 0) & (torch.arange(window) < window - 1))",
    ),
    "window one long": ("targets.reference.planner", "config.sliding_window", "config.sliding_window + 1"),
    "no sink": (ATTENTION, "denominator = (sink - top).exp()", "denominator = torch.zeros_like(top)"),
    "sink scaled": (ATTENTION, "(sink - top)", "(sink * scale - top)"),
    "keys of the second set seen by all": (
        ATTENTION,
        "distinct, seen\n",
        "distinct, torch.ones_like(seen)\n",
    ),
    "no head RMS of q": (
        CORE,
        "q = rms_norm_rope(q, None, config.rms_norm_eps, step.positions, self._frequencies, out_dtype=torch.float32)",
        "q = apply_rope(q, step.positions, self._frequencies)",
    ),
    "indexer without ReLU": (INDEXER, "dots.relu_()", "dots"),
    "indexer without rope on q": (CORE, "apply_rope(q, step.positions, self._frequencies), keys", "q, keys"),
    "indexer weights dropped": (INDEXER, "weights.reshape(-1, 1, heads)", "weights.reshape(-1, 1, heads).abs()"),
    "comb not transposed": (HC, "comb.transpose(1, 2), streams", "comb, streams"),
    "post without its factor": (HC, "post = 2 * torch", "post = torch"),
    "Sinkhorn with 3 iterations": (HC, "range(iterations - 1)", "range(2)"),
    "shared expert not clamped": (
        "targets.reference.experts",
        "expert_mlp(values, *self._shared, self._limit,",
        "expert_mlp(values, *self._shared, 1e9,",
    ),
    "gate clamped on both sides": ("ops.swiglu", "gate.clamp(max=limit)", "gate.clamp(-limit / 8, limit)"),
    "clamp after SiLU": ("ops.swiglu", "F.silu(gate.clamp(max=limit))", "F.silu(gate).clamp(max=limit)"),
    "up not clamped": ("ops.swiglu", "up.clamp(-limit, limit)", "up"),
    "bias in the routing weights": (
        MOE,
        "route_weights(scores, experts, scaling)\n\n\ndef route_hash",
        "route_weights(scores + bias, experts, scaling)\n\n\ndef route_hash",
    ),
    "softplus without the root": (MOE, ".t()).sqrt()", ".t())"),
    "no routed scaling": (MOE, "+ 1e-20) * scaling", "+ 1e-20)"),
    "hash layers routed by scores": (
        MOE,
        "experts = table[token_ids].long()",
        "experts = router_scores(x, gate).topk(table.shape[1]).indices",
    ),
    "gate and up share one alpha": (
        "weights.matrix",
        "torch.cat([matrix.global_scale_of_rows() for matrix in matrices])",
        "torch.cat([m.global_scale_of_rows() for m in matrices]).amax().expand(sum(len(m.packed) for m in matrices))",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_seen(mistake, checkpoint, ids, expected):
    """By the first pass that shows it; those behind it are left out."""
    errors, done = [], 0
    with mutated(*MISTAKES[mistake]):
        for found in passes(checkpoint, ids):
            errors.append((found - expected[done : done + len(found)]).abs().max().item())
            done += len(found)
            if not errors[-1] <= 5 * BOUND:
                return
    pytest.fail(f"{mistake}: the log-probabilities moved by {max(errors):.1e} only")


HIDDEN = {
    "Sinkhorn rows and columns swapped": (
        "(eps_1, comb, ones)\n        comb = comb / torch.baddbmm(eps_1, ones_t, comb)",
        "(eps_1, ones_t, comb)\n        comb = comb / torch.baddbmm(eps_1, comb, ones)",
    ),
    "19 iterations": ("range(iterations - 1)", "range(iterations - 2)"),
    "eps dropped from the softmax": ("torch.softmax(logits, dim=-1) + eps", "torch.softmax(logits, dim=-1)"),
    "eps dropped from the sums": ("comb.new_full((1, 1, 1), eps)", "comb.new_zeros(1, 1, 1)"),
    "eps dropped from pre": ("+ base[:n]) + hc_eps", "+ base[:n])"),
}


@pytest.mark.parametrize("mistake", HIDDEN)
def test_hidden_mistake_is_seen_in_the_mixing(mistake):
    """Against transformers' module, with an eps and logits large enough for the mistake to rise above fp32 noise."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    from tests.support.released import FLASH, config_json

    raw = config_json(FLASH, hidden_size=256, num_hidden_layers=1, compress_ratios=[0, 0], hc_eps=1e-3)
    theirs = DeepseekV4HyperConnection(DeepseekV4Config(**{k: v for k, v in raw.items() if k != "architectures"}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(generator=generator)
        theirs.fn.mul_(1024**-0.5)
        theirs.scale.copy_(torch.tensor([1.0, 1.0, 4.0]))
        streams = torch.randn(400, 4, 256, generator=generator)
        _, comb, collapsed = theirs(streams[None])

        def errors() -> tuple[float, float]:
            module = importlib.import_module("nvfp4_sgl.ops.hyper_connection")
            ours, _, our_comb = module.hyper_connection_pre(
                streams, theirs.fn, theirs.base, theirs.scale, iterations=20, hc_eps=1e-3, norm_eps=1e-6
            )
            return (our_comb - comb[0]).abs().max().item(), (ours - collapsed[0]).abs().max().item()

        right = errors()
        with mutated(HC, *HIDDEN[mistake]):
            wrong = errors()
    assert max(right) <= 2e-6
    assert max(wrong) > 2e-5
