"""Inputs of attention: latents, and the compressors' states, entries and index keys."""

from __future__ import annotations

from dataclasses import replace

import torch

from nvfp4_sgl.triton_kernels.attention_inputs.latent import Latents
from nvfp4_sgl.triton_kernels.attention_inputs.prepare import prepare_attention
from tests.sm100.triton.cases.case import Outputs, case, close, next_codes
from tests.sm100.triton.cases.rows import BF16, outputs_of
from tests.triton.support.compression import World
from tests.triton.support.rows import poisoned_rows
from tests.triton.test_attention_inputs import LAYERS, some_index_weights, some_latents

ENTRIES = next_codes(2e-3)
"""Softmax over a window, a norm and a rotation: a code next to a tie, seldom."""
NEAR = {
    "q": BF16,
    "window": next_codes(1e-3),
    "pages0": ENTRIES,
    "pages1": ENTRIES,
    "codes": next_codes(1e-2),
    "block_scales": next_codes(1e-2),
    "scale": BF16,
    "index_weights": close(0.0, 2.0**-15),
}


def latents_of(latents: Latents) -> Outputs:
    found = {"window": latents.pages}
    if latents.q_out is not None:
        found["q"] = latents.q_out
    return found if latents.q_rows is None else {**found, **outputs_of(latents.q_rows)}


def passes(
    layer: str, before: dict[int, int], *counts: dict[int, int], padding: int = 0, weigh: bool = False
) -> Outputs:
    """One pass after another; what the last leaves, states included. ``weigh``: beside a product of index weights."""
    world = World(LAYERS[layer], "cpu", requests=3)
    world.suppose(before)
    found: Outputs = {}
    for added in counts:
        batch, wide = world.prepare(added, padding)
        latents = some_latents(batch.tokens, 128, torch.float32, "cpu")
        given = some_index_weights(batch.tokens, 5, 600, "cpu") if weigh else None
        prepare_attention(
            latents, world.calls(wide), batch, world.frequencies, workspace=world.workspace, index_weights=given
        )
        found |= latents_of(latents)
        if given is not None:
            found["index_weights"] = given.out
    for number, side in enumerate(world.sides):
        found |= {f"state{number}": side.state, f"pages{number}": side.pages}
    return {**found, "semaphores": world.workspace.semaphores}


@case("_cos_sin_kernel", "_attention_inputs", bounds=NEAR)
def latents_alone() -> Outputs:
    world = World([], "cpu")
    latents = some_latents(5, 128, torch.bfloat16, "cpu")
    prepare_attention(latents, [], world.batch([1], [0], [5]), world.frequencies)
    return latents_of(latents)


@case("_cos_sin_kernel", "_attention_inputs", bounds=NEAR)
def latents_quantised() -> Outputs:
    world = World([], "cpu")
    latents = replace(some_latents(3, 192, torch.float32, "cpu"), q_rows=poisoned_rows(3, 192, "cpu", token_tile=8))
    prepare_attention(latents, [], world.batch([1], [0], [3]), world.frequencies)
    return latents_of(latents)


@case("_cos_sin_kernel", "_attention_inputs", bounds=NEAR)
def compression_by_four() -> Outputs:
    """Ragged requests, one of which closes windows; then a decode step with padding."""
    return passes("CSA", {1: 125, 2: 2}, {1: 4, 2: 1, 3: 2}, {1: 1, 2: 1, 3: 1}, padding=1)


@case("_cos_sin_kernel", "_attention_inputs", bounds=NEAR)
def a_decode_step_with_index_weights() -> Outputs:
    return passes("CSA", {1: 127, 2: 2}, {1: 1, 2: 1}, weigh=True)


@case("_cos_sin_kernel", "_attention_inputs", bounds=NEAR)
def compression_by_128() -> Outputs:
    return passes("HCA", {1: 126, 2: 3}, {1: 1, 2: 2}, {1: 1, 2: 1, 3: 1})
