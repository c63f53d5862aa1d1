"""Inputs of drafts: a token's row added to its streams, and mean streams."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.ops.drafts import mtp_streams
from nvfp4_sgl.triton_kernels.hyper_connection.draft_inputs import add_to_streams, stream_means
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
@pytest.mark.parametrize(("layers", "tokens", "width", "count"), [(1, 1, 8, 4), (3, 3, 1500, 4), (2, 5, 64, 3)])
def test_stream_means(layers: int, tokens: int, width: int, count: int, dtype: torch.dtype, device: str) -> None:
    captured = [drawn(tokens, count, width, seed=layer, dtype=dtype).to(device) for layer in range(layers)]
    out = torch.full((tokens, layers * width), torch.nan, dtype=dtype, device=device)
    assert stream_means(captured, out) is out
    exact = torch.cat([streams.double().mean(1) for streams in captured], dim=1)
    largest = torch.cat([streams.double().abs().mean(1) for streams in captured], dim=1)
    bound = 2.0**-8 * exact.abs() if dtype is torch.bfloat16 else 0.0
    assert bool(((out.double() - exact).abs() <= bound + 2.0**-22 * largest).all())


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
    for captured, means, message in (
        ([], out[0], "captured layers: "),
        ([out, out[:1]], torch.zeros(2, 16), r"captured\[1\]: expected shape"),
        ([out], torch.zeros(2, 16), "out: expected shape"),
        ([out.half()], torch.zeros(2, 8), r"captured\[0\]: expected dtype"),
    ):
        with pytest.raises(OperandError, match=message):
            stream_means(captured, means)


def launches() -> None:
    add_to_streams(torch.zeros(64, 7168), torch.zeros(256, 7168), torch.zeros(64, 4, 7168, dtype=torch.bfloat16))
    captured = [torch.zeros(64, 4, 7168, dtype=torch.bfloat16) for _ in range(3)]
    stream_means(captured, torch.zeros(64, 3 * 7168, dtype=torch.bfloat16))


def test_kernels_fit() -> None:
    found = resources(__name__)
    assert len(found) == 4
    for usage in found:
        assert usage.local == usage.stack == 0
        assert usage.count("fma.rn.f32") == 0
