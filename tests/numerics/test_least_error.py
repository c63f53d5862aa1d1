"""Block scales by least squared error: never worse than by maximum, and the best of what is tried."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_sgl.formats.least_error import ABOVE, BELOW, quantize_weight_least_error
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor, quantize_weight
from tests.support import numpy_nvfp4


def weights(kind: str, n: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    x = torch.randn(n, k, generator=generator)
    match kind:
        case "outliers":
            return torch.where(torch.rand(n, k, generator=generator) < 0.01, 30 * x, x) * 0.02
        case "tiny beside huge":
            return x * torch.logspace(-30, 8, n)[:, None]
        case "zeros":
            return torch.where(torch.rand(n, k // 16, generator=generator) < 0.5, 0, 1).repeat_interleave(16, 1) * x
        case "on the grid":
            return NvFp4Tensor(
                torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8),
                torch.randint(1, 127, (n, k // 16), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn),
                torch.tensor(0.003),
            ).dequantize()
    return x.bfloat16()


def errors(quantised: NvFp4Tensor, w: Tensor) -> np.ndarray:
    """fp64 [N, K/16]: sums of squares, of values as fp32 holds them."""
    scale = quantised.block_scale.view(torch.uint8).numpy()
    g = quantised.global_scale.numpy()
    values = numpy_nvfp4.dequantize(quantised.packed.numpy(), scale).astype(np.float32) * g
    return np.square(values.astype(np.float64) - w.double().numpy()).reshape(len(w), -1, 16).sum(-1)


KINDS = ("normal", "outliers", "tiny beside huge", "zeros", "on the grid")


@pytest.mark.parametrize("factor", [1.0, 1.7, 40.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_no_block_is_worse_than_by_its_maximum(kind: str, factor: float) -> None:
    """``factor`` over the global scale that the maximum asks for: ties loosen it, and blocks may be cut off."""
    w = weights(kind, 37, 176)
    g = w.float().abs().amax() / 2688 * factor
    ours, by_maximum = quantize_weight_least_error(w, g), quantize_weight(w, g)
    assert ours.global_scale == g
    assert np.all(errors(ours, w) <= errors(by_maximum, w))


@pytest.mark.parametrize("kind", ["normal", "outliers", "tiny beside huge"])
def test_every_block_is_the_best_of_its_neighbours(kind: str) -> None:
    w = weights(kind, 37, 176)
    g = w.float().abs().amax() / 2688
    ours = quantize_weight_least_error(w, g)
    first = quantize_weight(w, g).block_scale.view(torch.uint8).numpy().astype(int)
    best = None
    for offset in range(-BELOW, ABOVE + 1):
        scale = np.clip(first + offset, 1, 126).astype(np.uint8)
        packed, _ = numpy_nvfp4.encode(w.float().numpy(), scale, g.numpy())
        found = errors(NvFp4Tensor(torch.from_numpy(packed), torch.from_numpy(scale).view(torch.float8_e4m3fn), g), w)
        best = found if best is None else np.minimum(best, found)
    assert best is not None and np.all(errors(ours, w) <= best * (1 + 2**-15))


def test_it_is_worth_it() -> None:
    w = weights("normal", 64, 1024)
    g = w.float().abs().amax() / 2688
    ours, by_maximum = (errors(f(w, g), w).sum() ** 0.5 for f in (quantize_weight_least_error, quantize_weight))
    assert 0.80 < ours / by_maximum < 0.90


@pytest.mark.parametrize("power", [-80, 80])
def test_powers_of_two_change_nothing(power: int) -> None:
    """Weights and global scale are scaled alike: squared errors neither vanish nor overflow."""
    w = weights("outliers", 33, 96)
    g = w.abs().amax() / 2688
    plain, scaled = quantize_weight_least_error(w, g), quantize_weight_least_error(w * 2.0**power, g * 2.0**power)
    assert torch.equal(scaled.packed, plain.packed)
    assert torch.equal(scaled.block_scale.view(torch.uint8), plain.block_scale.view(torch.uint8))


def test_the_farthest_scales_are_chosen_where_they_are_best() -> None:
    """Blocks on the grid of a scale up to six codes above or three below the one that their largest value asks for."""
    generator = torch.Generator().manual_seed(5)
    grid = torch.tensor([[0.5, 1.0, 1.5, 2.0, 3.0, 4.0], [1.5, 1.5, 3.0, 3.0, 4.0, 4.0]]).repeat_interleave(2000, 0)
    offsets = torch.arange(4000) % 10 - 3
    w = grid.gather(1, torch.randint(6, (4000, 16), generator=generator)) * (1 + (offsets % 8) / 8)[:, None]
    w *= 2.0 ** (offsets // 8)[:, None]
    w[:, 5] = 5.82 + 0.55 * torch.rand(4000, generator=generator)
    g = torch.tensor(1.0)
    found = quantize_weight_least_error(w, g)
    first = quantize_weight(w, g).block_scale.view(torch.uint8).numpy().astype(int)
    by_offset = []
    for offset in range(-3, 7):
        scale = (first + offset).astype(np.uint8)
        packed, _ = numpy_nvfp4.encode(w.numpy(), scale, g.numpy())
        by_offset.append(
            errors(NvFp4Tensor(torch.from_numpy(packed), torch.from_numpy(scale).view(torch.float8_e4m3fn), g), w)
        )
    best = np.stack(by_offset)
    chosen = found.block_scale.view(torch.uint8).numpy().astype(int) - first
    assert {-3, 6} <= set(chosen.flatten().tolist())
    assert np.all(errors(found, w) <= best.min(0) * (1 + 2**-15))


def test_of_equally_good_scales_the_larger_wins() -> None:
    """6 and 1.5 are on the grids of the scales 1.5 and 1, 7.2 is equally far from both; its own scale is 1.25."""
    w = torch.tensor([[7.2, *[6.0] * 7, *[1.5] * 8]])[:, torch.randperm(16, generator=torch.Generator().manual_seed(6))]
    assert quantize_weight(w, torch.tensor(1.0)).block_scale.float().item() == 1.25
    assert quantize_weight_least_error(w, torch.tensor(1.0)).block_scale.float().item() == 1.5


def test_an_exact_block_keeps_the_maximum_s_scale() -> None:
    """6, 3 and 1.5 are on the grid of that scale, 1, and on that of 1.5, which is tried later; zeros are on all."""
    w, one = torch.tensor([[6.0, -3.0, 1.5, 0.0] * 4, [0.0] * 16]), torch.tensor(1.0)
    found, by_maximum = (quantise(w, one).block_scale for quantise in (quantize_weight_least_error, quantize_weight))
    assert found.float()[0].item() == 1
    assert torch.equal(found.view(torch.uint8), by_maximum.view(torch.uint8))


def test_codes_are_those_of_the_scales() -> None:
    w = weights("outliers", 33, 96)
    found = quantize_weight_least_error(w, w.abs().amax() / 2688)
    scale = found.block_scale.view(torch.uint8).numpy()
    packed, _ = numpy_nvfp4.encode(w.numpy(), scale, found.global_scale.numpy())
    assert np.array_equal(found.packed.numpy(), packed)


def test_pieces_of_rows_are_the_rows_of_the_whole() -> None:
    w = weights("outliers", 40, 128)
    g = w.abs().amax() / 2688
    whole, part = quantize_weight_least_error(w, g), quantize_weight_least_error(w[13:29], g)
    assert torch.equal(whole.packed[13:29], part.packed)
    assert torch.equal(whole.block_scale.view(torch.uint8)[13:29], part.block_scale.view(torch.uint8))
