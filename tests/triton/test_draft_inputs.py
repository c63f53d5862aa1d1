"""Inputs of drafts: a token's row added to its streams, and mean streams."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.ops.drafts import mtp_streams
from nvfp4_sgl.triton_kernels.hyper_connection.draft_inputs import add_to_streams, stream_mean
from tests.triton.support.resources import resources


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x.flatten()[::97] *= 300
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width", "count"), [(1, 8, 4), (3, 1500, 4), (5, 64, 1), (0, 64, 4)])
def test_add_to_streams(tokens: int, width: int, count: int, dtype: torch.dtype, device: str) -> None:
    """Rows may be columns of a wider result."""
    wide = drawn(tokens, 2 * width, seed=1).to(device)
    token, streams = wide[:, width:], drawn(tokens * count, width, seed=2).to(device)
    out = torch.full((tokens, count, width), torch.nan, dtype=dtype, device=device)
    assert add_to_streams(token, streams, out) is out
    assert torch.equal(out, mtp_streams(token, streams.view(tokens, count, width)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width", "count"), [(1, 8, 4), (3, 1500, 4), (5, 64, 3), (0, 64, 4)])
def test_stream_mean(tokens: int, width: int, count: int, dtype: torch.dtype, device: str) -> None:
    """Into columns of a wider tensor, whose others are left alone."""
    streams = drawn(tokens, count, width, seed=3, dtype=dtype).to(device)
    wide = torch.full((tokens, 3 * width), torch.nan, dtype=dtype, device=device)
    out = wide[:, width : 2 * width]
    assert stream_mean(streams, out) is out
    exact, largest = streams.double().mean(1), streams.double().abs().mean(1)
    bound = 2.0**-8 * exact.abs() if dtype is torch.bfloat16 else 0.0
    assert bool(((out.double() - exact).abs() <= bound + 2.0**-22 * largest).all())
    assert bool(wide[:, :width].isnan().all()) and bool(wide[:, 2 * width :].isnan().all())


def test_refusals() -> None:
    token, streams, out = torch.zeros(2, 8), torch.zeros(8, 8), torch.zeros(2, 4, 8)
    for given, message in (
        ((token.half(), streams, out), "token: expected dtype"),
        ((token, streams[:6], out), "streams: expected shape"),
        ((token, streams, out.half()), "out: expected dtype"),
        ((token, streams, out[0]), "out: expected"),
    ):
        with pytest.raises(OperandError, match=message):
            add_to_streams(*given)
    for wrong, message in (
        ((out, token[:1]), "out: expected shape"),
        ((out.half(), token), "streams: expected dtype"),
        ((out, token.half()), "out: expected dtype"),
        ((out[0], token), "streams: expected"),
        ((out.transpose(1, 2), token), "streams: expected"),
    ):
        with pytest.raises(OperandError, match=message):
            stream_mean(*wrong)


def launches() -> None:
    add_to_streams(torch.zeros(64, 7168), torch.zeros(256, 7168), torch.zeros(64, 4, 7168, dtype=torch.bfloat16))
    means = torch.zeros(64, 3 * 7168, dtype=torch.bfloat16)
    stream_mean(torch.zeros(64, 4, 7168, dtype=torch.bfloat16), means[:, 7168 : 2 * 7168])


def test_kernels_fit() -> None:
    found = resources(__name__)
    assert len(found) == 4
    for usage in found:
        assert usage.local == usage.stack == 0
        assert usage.count("fma.rn.f32") == 0
