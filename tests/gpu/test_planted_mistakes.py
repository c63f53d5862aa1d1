"""Mistakes planted in the shared model, or in what GPUs add to it, are seen on every GPU target.

The reference's results are recorded before anything is planted (``tests.support.lockstep``), so a mistake in the model
that both share does not hide. Each is looked for in the one place where it shows; every boundary has one at least.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.triton_kernels.indexer import topk
from tests.support import native
from tests.support.interpreted import ON_GPU
from tests.support.lockstep import Recording, record, relative_errors, replace_sublayers, replay
from tests.support.mutation import mutated

DEVICE = "cuda" if ON_GPU else "cpu"
TARGETS = native.targets()
SWA, CSA, HCA = range(3)
CACHED = {0: 4003, 1: 700}
"""After 4003 tokens HCA layers see 31 entries, more than the columns of a plan for half as many."""
EDGE, OVER = 250, 20
"""Cached tokens, and tokens of a pass that ends in the next page: the first page's ring keeps 6 of them."""
PROMPT = {0: [7, 300, 41]}
"""What goes through the embedding and all mHC sites."""
BOUNDS: dict[str, dict[int | str, float]] = {
    "sm_90a": {SWA: 0.03, CSA: 0.3, HCA: 0.03, "experts": 0.01, "state": 0.05, "ring": 0.05, "streams": 0.013},
    "sm_100a": {SWA: 0.2, CSA: 0.3, HCA: 0.2, "experts": 0.02, "state": 0.05, "ring": 0.05, "streams": 0.013},
}
"""Bounds of the worst row's relative error in attention by layer, in the experts, and in the hidden states behind all
mHC sites ("streams"); and of a state's values, after a decode step or after a pass over a page's edge ("ring").

A query of a CSA layer may choose another entry near the margin."""


@dataclass(frozen=True)
class Mistake:
    """``old`` becomes ``new`` in ``module``; it shows in ``layer``, in ``place``: attention, experts, state or ring.

    In place "streams" it shows whatever the layer.
    """

    module: str
    old: str
    new: str
    layer: int
    place: str = "attention"


MISTAKES = {
    "compressed layers rotated by the window's table": Mistake(
        "config", "RopeTable.COMPRESSED if", "RopeTable.WINDOW if", HCA
    ),
    "window-only layers rotated by the compressed table": Mistake(
        "config", "else RopeTable.WINDOW", "else RopeTable.COMPRESSED", SWA
    ),
    "no YaRN": Mistake("model.rope_tables", "compress_rope_theta, config.yarn", "compress_rope_theta, None", HCA),
    "the compressor's values and scores taken for each other": Mistake(
        "weights.layout",
        '["compressor.wkv", "compressor.wgate"]',
        '["compressor.wgate", "compressor.wkv"]',
        HCA,
        "state",
    ),
    "gate and up swapped": Mistake(
        "weights.layout",
        'Shard(f"{name}.w1", rows=inner), Shard(f"{name}.w3", rows=inner)',
        'Shard(f"{name}.w3", rows=inner), Shard(f"{name}.w1", rows=inner)',
        SWA,
        "experts",
    ),
    "shared expert left out": Mistake(
        "targets.fused.router",
        "shared_expert=shared, window_write=window_write)\n        elif",
        "shared_expert=False, window_write=window_write)\n        elif",
        SWA,
        "experts",
    ),
    "no routed scaling": Mistake(
        "targets.fused.router", "self._config.routed_scaling_factor, routes", "1.0, routes", SWA, "experts"
    ),
    "hash layers routed by other tokens' ids": Mistake(
        "targets.fused.router", "self.tid2eid, token_ids, *", "self.tid2eid, token_ids.flip(0), *", SWA, "experts"
    ),
    "HCA's list of columns halved": Mistake("triton_kernels.plan.resolve", "longest // 128", "longest // 256", HCA),
    "candidates reused with too few columns": Mistake(
        "targets.fused.step", "rows <= known_rows and columns <= known_columns", "rows <= known_rows", CSA
    ),
    "HCA entries not attended": Mistake(
        "targets.fused.attention", "entries = plan.entry_slots, plan.entry_lengths", "extra = None", HCA
    ),
    "no head RMS of q": Mistake("targets.fused.attention", "query_eps=config.rms_norm_eps", "query_eps=1.0", SWA),
    "window one short": Mistake(
        "targets.fused.attention", "window_lengths=plan.window_lengths", "window_lengths=plan.window_lengths // 2", SWA
    ),
    "index weights in another order": Mistake(
        "model.attention", "prepared.index_weights, step", "prepared.index_weights.flip(1), step", CSA
    ),
    "the ring's tail of full pages not kept": Mistake(
        "triton_kernels.attention_inputs.compress_csa",
        "(position >= tl.minimum((page + 1) * 256, end) - RING)",
        "(position >= end - RING)",
        CSA,
        "ring",
    ),
    "columns of a GEMM one further": Mistake(
        "targets.fused.projections", "result.split(sizes", "result.roll(1, dims=1).split(sizes", HCA
    ),
    "o-groups in another order": Mistake(
        "targets.fused.projections", "result.flatten(1)", "result.flip(1).flatten(1)", HCA
    ),
    "alphas of gate and up exchanged": Mistake(
        "targets.fused.nvfp4_matrices",
        "gate_up.global_scale[:, 0].unflatten(0, halves)",
        "gate_up.global_scale[:, 0].unflatten(0, halves).flip(1)",
        SWA,
        "experts",
    ),
    "embeddings of other tokens": Mistake(
        "targets.fused.sites",
        "embed_streams(token_ids, table",
        "embed_streams(token_ids.flip(0), table",
        SWA,
        "streams",
    ),
    "mHC sites taken for each other": Mistake(
        "model.layer",
        'attention = SiteNames(f"{stem}.hc_attn", f"{stem}.attn_norm.weight", iterations)\n        experts =',
        'experts = SiteNames(f"{stem}.hc_attn", f"{stem}.attn_norm.weight", iterations)\n        attention =',
        SWA,
        "streams",
    ),
    "Sinkhorn with 2 iterations": Mistake(
        "targets.fused.sites", "names.iterations,\n", "min(names.iterations, 2),\n", SWA, "streams"
    ),
}


@dataclass(frozen=True)
class Told:
    """What the reference gives: a decode step, a pass over a page's edge, and hidden states of the prompt."""

    decode: Recording
    edge: Recording
    hidden: torch.Tensor


@pytest.fixture(autouse=True)
def chosen_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks of so few entries that each nominates candidates."""
    monkeypatch.setattr(topk, "CHUNK_SCORES", 128)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=5, num_hidden_layers=3)
    return path


@torch.no_grad()
def hidden_states(model: Any) -> torch.Tensor:
    """Of the prompt, behind the embedding and all mHC sites, with the same sublayers in between for every target."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        replace_sublayers(model, monkeypatch)
        model.reset()
        work = model.begin(PROMPT)
        streams = model.decoder.embed(work.ids, model.table)
        hidden: torch.Tensor = model.decoder(streams, work.ids, work.step, model.caches.layers)
    return hidden.float().cpu()


@pytest.fixture(scope="module")
def recordings(checkpoint: Path) -> dict[str, Told]:
    one_each: dict[int, list[int]] = {0: [17], 1: [301]}

    def told(target: str) -> Told:
        mode = native.MODES[target]
        decode = record(checkpoint, mode=mode, cached=CACHED, passes=[one_each], capacity=4096)
        edge = record(checkpoint, mode=mode, cached={0: EDGE, 1: 3}, passes=[{0: [9] * OVER}], capacity=4096)
        reference: Any = Standalone(checkpoint, packed=True, dtype=torch.bfloat16, requests=1, capacity=256)
        return Told(decode, edge, hidden_states(reference))

    return {target: told(target) for target in TARGETS}


def error_of(target: str, checkpoint: Path, reference: Told, layer: int, place: str) -> float:
    """Error of the package as it is imported right now; infinite where it refuses to run or gives a NaN."""
    standalone: Any = importlib.import_module("nvfp4_sgl.standalone")
    recording = reference.edge if place == "ring" else reference.decode
    try:
        with native.gemms(target):
            model = standalone.Standalone(checkpoint, target=target, device=DEVICE, requests=2, capacity=4096)
            if place == "streams":
                return float(relative_errors(hidden_states(model), reference.hidden).max().nan_to_num(torch.inf))
            model.begin({0: [5, 6, 7]})  # what a short pass allocated must not be too small for a long one
            (row,) = replay(model, recording, [layer])
    except Exception as error:
        print(f"refused: {error}")
        return float("inf")
    found, told = row[layer], recording.layers[0][layer]
    if place in ("state", "ring"):
        return float((found.after["state"] - told.after["state"]).abs().nan_to_num().max())
    pair = (found.experts, told.experts[1]) if place == "experts" else (found.attention, told.attention[1])
    return float(relative_errors(*pair).max().nan_to_num(torch.inf))


def bound(target: str, layer: int, place: str) -> float:
    return BOUNDS[target][layer if place == "attention" else place]


PLACES = [
    *((layer, place) for layer in (SWA, CSA, HCA) for place in ("attention", "experts")),
    (HCA, "state"), (CSA, "ring"), (SWA, "streams"),
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("layer", "place"), PLACES)
def test_nothing_planted(layer: int, place: str, target: str, checkpoint: Path, recordings: dict[str, Told]):
    error = error_of(target, checkpoint, recordings[target], layer, place)
    print(f"{target} layer {layer} {place}: {error:.4f}")
    assert error < bound(target, layer, place) / 1.3


def planted() -> list[Any]:
    """Each mistake on each target; unless ``--full`` asks for all, on the one with the wider bound, else on SM100.

    Targets share what the mistakes are planted in: what a wide bound shows a narrow one would.
    """
    return [
        pytest.param(name, target, marks=[] if target == widest(mistake) else [pytest.mark.full], id=f"{name}-{target}")
        for name, mistake in MISTAKES.items()
        for target in TARGETS
    ]


def widest(mistake: Mistake) -> str:
    """The target that tolerates most where the mistake shows."""
    return max(reversed(TARGETS), key=lambda target: bound(target, mistake.layer, mistake.place))


@pytest.mark.parametrize(("name", "target"), planted())
def test_mistake_is_seen(name: str, target: str, checkpoint: Path, recordings: dict[str, Told]):
    mistake = MISTAKES[name]
    with mutated(mistake.module, mistake.old, mistake.new):
        error = error_of(target, checkpoint, recordings[target], mistake.layer, mistake.place)
    print(f"{target}: {name}: {error:.3f}")
    assert error > bound(target, mistake.layer, mistake.place), f"{name}: the worst row moved by {error:.3f} only"
