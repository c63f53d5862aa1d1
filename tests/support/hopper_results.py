"""What Hopper's GEMMs may be off by on a GPU, and tokens for them."""

from __future__ import annotations

import torch
from torch import Tensor


def tokens(*shape: int) -> Tensor:
    """bf16 with outliers."""
    values = torch.randn(*shape, device="cuda")
    return torch.where(torch.rand_like(values) < 0.01, values * 100, values).bfloat16()


def assert_close(found: Tensor, x: Tensor, weight: Tensor) -> None:
    """Compare ``found`` [tokens, features] with x @ weight.T, both of K elements a row.

    One rounding to bf16 is 2^-8 of the result. wgmma adds 16 products at a time to a sum in fp32: it aligns exact
    products and the sum to the largest of them and truncates (Fasi et al., "Numerical behavior of NVIDIA tensor cores",
    PeerJ Computer Science 7:e330, 2021; seen on an H200, tests/sm100/hardware/warpgroup_cases.py). Sums are always
    truncated towards zero, so K / 16 losses add up instead of cancelling. Each is less than 2^-23 of a partial sum, and
    no partial sum exceeds sum |x| |weight|: in all K / 16 * 2^-23 of that, 2^-15 at K = 4096.

    That bound takes truncated products to be small beside the truncated sum: they are of both signs and keep a bit or
    two more than fp32. Simulated with these tokens and weights at K = 4096, with one such bit and with two, truncated
    sums are off by up to 2^-17.9 of sum |x| |weight|, and sums of rounded fp32 by 2^-22.
    """
    expected, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    error = (found.double() - expected).abs()
    allowed = expected.abs() * 2.0**-8 + magnitude * (x.shape[-1] / 16 * 2.0**-23)
    outside = ~(error <= allowed)  # NaN, too
    if bool(outside.any()):
        excess = torch.where(outside, (error / allowed).nan_to_num(nan=torch.inf), 0.0)
        row, feature = divmod(int(excess.argmax()), found.shape[-1])
        raise AssertionError(
            f"{int(outside.sum())} of {found.numel()} results are off by more than rounding; the worst is token {row},"
            f" feature {feature}: expected {float(expected[row, feature])} within {float(allowed[row, feature]):.3g},"
            f" found {float(found[row, feature])}"
        )
