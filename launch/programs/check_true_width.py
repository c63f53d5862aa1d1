"""The check behind launch/check_true_width: one decode token through one CSA layer with the released models' sizes.

The token stands behind cached tokens whose entries are random and valid, more than it may choose. Attention and experts
get inputs of their own, so that the experts that the token visits are known before weights are drawn: only those are
materialised.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nvfp4_sgl.cache.layer import LayerCache  # noqa: E402
from nvfp4_sgl.cache.layout import PAGE_TOKENS  # noqa: E402
from nvfp4_sgl.cache.local import LocalCaches  # noqa: E402
from nvfp4_sgl.cache.rows import RowStore  # noqa: E402
from nvfp4_sgl.config import ModelConfig  # noqa: E402
from nvfp4_sgl.cutedsl_kernels.w4a4.operand import Weights  # noqa: E402
from nvfp4_sgl.model.attention import Attention  # noqa: E402
from nvfp4_sgl.model.contract import Activation, Context, PassRequest, Slots  # noqa: E402
from nvfp4_sgl.model.moe import MoE  # noqa: E402
from nvfp4_sgl.ops.modes import ActivationMode  # noqa: E402
from nvfp4_sgl.ops.moe import expert_mlp, route_topk  # noqa: E402
from nvfp4_sgl.targets.choose import choose  # noqa: E402
from nvfp4_sgl.targets.fused.activations import in_form  # noqa: E402
from nvfp4_sgl.targets.reference.projections import working_copy  # noqa: E402
from nvfp4_sgl.weights.layout import expert_matrices  # noqa: E402
from nvfp4_sgl.weights.matrix import load_matrix  # noqa: E402
from nvfp4_sgl.weights.parallel import TensorParallel  # noqa: E402
from tests.sm100.support.launcher import emulated_operations  # noqa: E402
from tests.support import interpreter_speed  # noqa: E402
from tests.support.lockstep import activations, choices, contents, overwrite, relative_errors  # noqa: E402
from tests.support.random_source import RandomSource  # noqa: E402
from tests.support.reference_gemms import reference_gemms  # noqa: E402
from tests.support.released import FLASH, PRO, config_json  # noqa: E402

MODELS = {"flash": FLASH, "pro": PRO}
CACHED, CAPACITY = {"flash": 2603, "pro": 4651}, 5120
"""The token closes a ratio-4 window; Flash chooses 512 of 651 entries, Pro 1024 of 1163."""
LAYER, MODE = 0, ActivationMode.W4A4
ATTENTION_BOUND, EXPERT_BOUND = 0.2, 0.01
"""Bounds of the relative error: what roundings to FP4 and bf16 explain (tests/gpu/test_sublayers.py)."""
ALIKE = 0.9
"""Share of the chosen entries that the reference must choose as well: near the margin roundings decide."""
RESULTS = ROOT / "launch" / "results" / "sm100_true_width.md"


@dataclass(frozen=True)
class Result:
    """Results of a model's layer.

    Attributes:
        attention, experts: relative errors to the CPU reference.
        entries: that the token sees. chosen: that it attends to. alike: share of these that the reference chooses, too.
        gemms: launched. seconds: of the SM100 part.
    """

    model: str
    attention: float
    experts: float
    entries: int
    chosen: int
    alike: float
    gemms: int
    seconds: float

    @property
    def passes(self) -> bool:
        return self.attention <= ATTENTION_BOUND and self.experts <= EXPERT_BOUND and self.alike >= ALIKE


def one_layer(base: dict[str, Any]) -> ModelConfig:
    raw = config_json(base, num_hidden_layers=1, compress_ratios=[4, 0], num_hash_layers=0, vocab_size=512)
    return ModelConfig.from_dict(raw)


def fill(store: RowStore, dim: int, slots: int, seed: int) -> None:
    """Random rows of order 1 in every slot."""
    rows = torch.randn(slots, dim, generator=torch.Generator().manual_seed(seed))
    store.write(torch.arange(slots), rows)


def caches_of(config: ModelConfig, cached: int) -> LocalCaches:
    """Packed caches full of valid entries and states."""
    caches = LocalCaches(config, requests=1, capacity=CAPACITY, packed=True, dtype=torch.bfloat16)
    layer: LayerCache = caches.layers[LAYER]
    slots = CAPACITY + PAGE_TOKENS  # the first page is that of padding
    fill(layer.swa, config.head_dim, slots, 1)
    for store, dim, seed in ((layer.compressed, config.head_dim, 2), (layer.index, config.index_head_dim, 3)):
        assert store is not None
        fill(store, dim, slots // 4, seed)
    for state, seed in ((layer.state, 4), (layer.index_state, 5)):
        assert state is not None
        state.copy_(torch.randn(state.shape, generator=torch.Generator().manual_seed(seed)))
    caches.advance({0: cached})
    return caches


def planned(context: Context, caches: LocalCaches, cached: int) -> tuple[Any, Tensor]:
    """The step of one more token, and its id."""
    table = caches.slots if context.boundaries == choose("cpu").boundaries else caches.slots.int()
    planner = context.boundaries.plan(context, Slots(table, caches.full_to_swa, 1, CAPACITY), caches.layers)
    position = torch.tensor([cached])
    return planner.plan(PassRequest(position, torch.zeros(1).long(), position + 1)), torch.tensor([7])


def reference_experts(context: Context, y: Tensor) -> tuple[Tensor, list[int]]:
    """The weighted sum in fp32 of the experts that the token visits, one after the other, and which they are."""
    config, source = context.config, context.source
    stem = f"layers.{LAYER}.ffn.gate"
    chosen, weights = route_topk(
        y,
        source.read(f"{stem}.weight"),
        source.read(f"{stem}.bias"),
        config.num_experts_per_tok,
        config.routed_scaling_factor,
    )
    matrices = expert_matrices(config, config.layer(LAYER), TensorParallel())
    total = torch.zeros(1, config.hidden_size)
    visits = [*zip(chosen[0].tolist(), weights[0].tolist(), strict=True), (config.n_routed_experts, 1.0)]
    present = replace(context, source=RandomSource(config, [expert for expert, _ in visits]))
    for expert, weight in visits:
        one = matrices[expert]
        gate_up, down = (load_matrix(present.source, shards) for shards in (one.gate_up, [one.down]))
        total += weight * expert_mlp(
            y, working_copy(gate_up), working_copy(down), config.swiglu_limit, MODE, torch.bfloat16
        )
    return total, [expert for expert, _ in visits[:-1]]


def only(present: RandomSource, method: str) -> Any:
    """``Weights.put_expert`` or ``put_gated_expert`` of experts that have contents."""
    original = getattr(Weights, method)
    experts = present._experts

    def put(self: Weights, expert: int, *parts: Tensor) -> None:
        if expert in experts or expert == len(self.codes) - 1:
            original(self, expert, *parts)

    return mock.patch.object(Weights, method, put)


def chosen_slots(found: list[Tensor]) -> set[int]:
    """The slots that the token chose, from :func:`tests.support.lockstep.choices`."""
    (slots,) = found
    return {int(slot) for slot in slots.flatten() if slot >= 0}


@torch.no_grad()
def check(model: str, emulate: bool) -> Result:
    config, width, cached = one_layer(MODELS[model]), MODELS[model]["hidden_size"], CACHED[model]
    x, y = activations(1, width, 1), activations(1, width, 2)
    cpu = Context(RandomSource(config, []), config, choose("cpu").boundaries, dtype=torch.bfloat16, mode=MODE)
    caches = caches_of(config, cached)
    before = {name: store.clone() for name, store in contents(caches.layers[LAYER]).items()}
    step, ids = planned(cpu, caches, cached)
    reference = Attention(cpu, config.layer(LAYER))
    with choices(reference) as found:
        expected = reference(Activation(x), step, caches.layers[LAYER]).float()
    told = chosen_slots(found)
    mixed, routed = reference_experts(cpu, y)
    print(f"{model}: reference done; experts {sorted(routed)}", flush=True)
    overwrite(caches.layers[LAYER], before)

    source = RandomSource(config, routed)
    sm100 = replace(cpu, source=source, boundaries=choose("sm_100a").boundaries)
    gemms = emulated_operations() if emulate else reference_gemms()
    with gemms as runner, only(source, "put_expert"), only(source, "put_gated_expert"):
        attention, experts = Attention(sm100, config.layer(LAYER)), MoE(sm100, config.layer(LAYER))
        step, ids = planned(sm100, caches, cached)
        started = time.monotonic()
        with choices(attention) as found:
            attended = attention(in_form(x, attention.takes), step, caches.layers[LAYER]).float()
        chosen = chosen_slots(found)
        print(f"{model}: attention done in {time.monotonic() - started:.0f} s", flush=True)
        given = experts(in_form(y, experts.takes), ids, step).float()
        seconds = time.monotonic() - started
    return Result(
        model,
        float(relative_errors(attended, expected)),
        float(relative_errors(given, mixed)),
        (cached + 1) // 4,
        len(chosen),
        len(chosen & told) / len(told),
        len(runner.keys),
        seconds,
    )


def report(results: list[Result]) -> str:
    rows = "\n".join(
        f"| {r.model} | {CACHED[r.model]} | {r.attention:.4f} | {r.experts:.4f} | {r.chosen} of {r.entries} |"
        f" {r.alike:.1%} | {r.gemms} | {r.seconds:.0f} s |"
        for r in results
    )
    return f"""# One CSA layer at true width on SM100, executed in the emulator

| model | cached | attention: relative error | experts: same | entries chosen | as the reference | GEMMs | time here |
| --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

One layer at its true width agrees with the CPU reference in `w4a4` within the bounds below. Nothing here ran on
a Blackwell GPU.

`launch/check_true_width --write`, {datetime.date.today().isoformat()}. One decode token behind cached tokens
of random valid entries; every GEMM's PTX for sm_100a executed in the emulator, Triton interpreted, against the CPU
reference on the same inputs and cached bytes.

Bounds: {ATTENTION_BOUND} for attention, whose intermediate activations are quantised again three times, so that a bf16
that rounds to the other side may move an FP4 code by a quarter of its value; {EXPERT_BOUND} for the experts;
{ALIKE:.0%} of the chosen entries are the reference's.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/check_true_width", description=__doc__)
    parser.add_argument(
        "models", nargs="*", default=[], metavar="MODEL", help="flash, pro or both, which is the default"
    )
    parser.add_argument("--torch-gemms", action="store_true", help="compute GEMMs in torch")
    parser.add_argument("--write", action="store_true", help="write launch/results/sm100_true_width.md")
    args = parser.parse_args()
    if args.write and (args.torch_gemms or args.models):
        parser.error("--write records both models with their GEMMs in the emulator: leave the other arguments out")
    if unknown := [model for model in args.models if model not in MODELS]:
        parser.error(f"{unknown[0]}: expected {' or '.join(MODELS)}")
    interpreter_speed.install()
    results = [check(model, not args.torch_gemms) for model in args.models or MODELS]
    text = report(results)
    print(text)
    if args.write:
        RESULTS.write_text(text)
    return int(not all(r.passes for r in results))


if __name__ == "__main__":
    sys.exit(main())
