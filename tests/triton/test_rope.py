"""Rotations against the reference: angles up to the longest context, any strides, in place, both ways."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.ops import rope as reference
from tests.triton.support.resources import resources
from triton_kernels.checks import KernelError
from triton_kernels.rope import apply_rope_, rms_norm_rope, rope_turns

EPS = 1e-6
POISON = float("nan")


def frequencies(pairs: int = 32, base: float = 160000.0) -> torch.Tensor:
    return reference.inverse_frequencies(2 * pairs, base)


def turns_at(positions: torch.Tensor, device: str, pairs: int = 32) -> torch.Tensor:
    out = torch.full((positions.numel(), 2 * pairs), POISON, device=device)
    return rope_turns(positions.to(device), frequencies(pairs).to(device), out)


def bf16_apart(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Largest distance in bf16 numbers, −0 and +0 being the same."""

    def rank(x: torch.Tensor) -> torch.Tensor:
        bits = x.to(torch.bfloat16).contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((rank(found.cpu()) - rank(expected)).abs().max())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("base", [10000.0, 160000.0])
def test_turns_are_those_of_fp32_angles_up_to_the_longest_context(dtype: torch.dtype, base: float, device: str):
    edges = [0, 1, 2, 127, 128, 4095, 65535, 65536, 300001, 1048574, 1048575]
    positions = torch.cat((torch.tensor(edges), torch.arange(7, 1048576, 11003))).to(dtype)
    table = frequencies(base=base)
    out = torch.full((positions.numel(), 64), POISON, device=device)
    rope_turns(positions.to(device), table.to(device), out)
    angles = (positions.float()[:, None] * table).double()  # the fp32 product is the angle
    expected = torch.stack((angles.cos(), angles.sin()), -1).flatten(1)
    assert float((out.cpu().double() - expected).abs().max()) <= 2 * 2.0**-24


def test_reference_angles_are_these(device: str):
    positions = torch.tensor([0, 5, 77777, 1048575])
    x = torch.zeros(4, 1, 64)
    x[..., 0::2] = 1.0
    expected = reference.apply_rope(x, positions, frequencies())[:, 0]
    assert torch.allclose(turns_at(positions, device).cpu(), expected, atol=3e-7, rtol=0)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "width"), [(1, 512), (3, 128), (8, 64), (19, 512)])
def test_rotation_in_place(heads: int, width: int, dtype: torch.dtype, inverse: bool, device: str):
    generator = torch.Generator().manual_seed(heads)
    wide = torch.randn(5, heads, width + 32, generator=generator).to(dtype)
    positions = torch.tensor([0, 1, 1048575, 31, 65536])
    moved = wide.clone().to(device)
    x = moved[..., :width]
    expected = reference.apply_rope(wide[..., :width], positions, frequencies(), inverse=inverse)
    assert apply_rope_(x, turns_at(positions, device), inverse=inverse) is x
    if dtype is torch.float32:
        assert torch.allclose(x.cpu(), expected, atol=2e-6, rtol=0)
    else:
        assert bf16_apart(x, expected) <= 1
    assert torch.equal(x[..., : width - 64].cpu(), wide[..., : width - 64])
    assert torch.equal(moved[..., width:].cpu(), wide[..., width:])


def test_turning_forth_and_back_is_the_identity(device: str):
    x = torch.randn(4, 2, 128, generator=torch.Generator().manual_seed(1))
    turns = turns_at(torch.tensor([3, 1000, 250000, 1048575]), device)
    there = apply_rope_(x.clone().to(device), turns)
    assert not torch.allclose(there.cpu(), x, atol=0.1)
    assert torch.allclose(apply_rope_(there, turns, inverse=True).cpu(), x, atol=2e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(1, 512), (5, 128), (8, 512), (3, 192)])
def test_norm_and_rotation(heads: int, width: int, in_place: bool, weighted: bool, device: str):
    generator = torch.Generator().manual_seed(width)
    wide = (torch.randn(3, heads, width + 8, generator=generator) * 30).to(torch.bfloat16)
    wide[1] *= 1e-4  # where eps counts
    weight = torch.randn(width, generator=generator).to(torch.bfloat16) if weighted else None
    positions = torch.tensor([0, 99999, 1048575])
    expected = reference.rms_norm_rope(wide[..., :width], weight, EPS, positions, frequencies())
    x = wide.clone().to(device)[..., :width]
    out = x if in_place else torch.full((3, heads, width), POISON, dtype=torch.bfloat16, device=device)
    moved = None if weight is None else weight.to(device)
    assert rms_norm_rope(x, moved, EPS, turns_at(positions, device), out) is out
    assert bf16_apart(out, expected) <= 1
    # Only the sum's order may differ from the reference.
    assert float((out.cpu() != expected).float().mean()) < 0.02


def test_norm_and_rotation_to_fp32(device: str):
    x = torch.randn(2, 4, 512, generator=torch.Generator().manual_seed(5))
    positions = torch.tensor([12, 1000000])
    out = torch.full_like(x, POISON, device=device)
    rms_norm_rope(x.to(device), None, EPS, turns_at(positions, device), out)
    assert torch.allclose(out.cpu(), reference.rms_norm_rope(x, None, EPS, positions, frequencies()), atol=3e-6)


def test_no_tokens(device: str):
    none = torch.zeros(0, 4, 512, dtype=torch.bfloat16, device=device)
    turns = turns_at(torch.zeros(0, dtype=torch.int64), device)
    rms_norm_rope(none, None, EPS, turns, apply_rope_(none, turns))


def test_a_result_does_not_depend_on_the_batch(device: str):
    x = torch.randn(6, 8, 512, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
    turns = turns_at(torch.arange(6) * 1000, device)
    together = rms_norm_rope(x, None, EPS, turns, torch.empty_like(x))
    alone = rms_norm_rope(x[4:5], None, EPS, turns[4:5].contiguous(), torch.empty_like(x[:1]))
    assert torch.equal(together[4:5], alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.zeros(3)}, "positions: expected dtype"),
        ({"frequencies": torch.ones(3), "out": torch.ones(3, 6)}, "power of two"),
        ({"out": torch.zeros(3, 7)}, "out: expected shape"),
    ],
)
def test_turns_refuse(change: dict[str, torch.Tensor], message: str):
    arguments = {"positions": torch.zeros(3, dtype=torch.int64), "frequencies": torch.ones(4), "out": torch.ones(3, 8)}
    with pytest.raises(KernelError, match=message):
        rope_turns(**(arguments | change))


def test_rotations_refuse():
    x, turns = torch.zeros(3, 2, 128), torch.zeros(3, 64)
    for bad, message in [
        (torch.zeros(2, 64), "turns: expected shape"),
        (torch.zeros(3, 256), "rope_dim of turns"),
        (turns.to(torch.bfloat16), "turns: expected dtype"),
    ]:
        with pytest.raises(KernelError, match=message):
            apply_rope_(x, bad)
    with pytest.raises(KernelError, match="last dimension"):
        apply_rope_(x.transpose(1, 2), turns)
    with pytest.raises(KernelError, match="weight: expected shape"):
        rms_norm_rope(x, torch.ones(64), EPS, turns, x)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "heads"), [(1, 128), (8192, 64)])
def test_real_sizes(tokens: int, heads: int, device: str):
    torch.manual_seed(tokens)
    x = torch.randn(tokens, heads, 512, device=device).to(torch.bfloat16)
    positions = torch.randint(0, 1048576, (tokens,))
    out = rms_norm_rope(x, None, EPS, turns_at(positions, device), torch.full_like(x, POISON))
    rows = torch.randint(0, tokens, (64,))
    expected = reference.rms_norm_rope(x[rows].cpu(), None, EPS, positions[rows], frequencies())
    assert not out.isnan().any()
    # Among millions, a rotation whose terms cancel turns the last bit of an input into two.
    assert bf16_apart(out[rows], expected) <= 2


def launches() -> None:
    positions = torch.zeros(16, dtype=torch.int64)
    turns = rope_turns(positions, torch.ones(32), torch.zeros(16, 64))
    for heads, width in ((64, 512), (64, 128), (1, 512)):
        x = torch.zeros(16, heads, width, dtype=torch.bfloat16)
        apply_rope_(x, turns, inverse=True)
        rms_norm_rope(x, None, EPS, turns, x)


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert len(found) >= 5
    for usage in found:
        usage.require_exact_arithmetic()
        if usage.kernel == "_turns_kernel":
            # sin and cos of large angles keep their reduction in a small array and are polynomials of fused steps.
            assert usage.local == 0 and usage.stack <= 40
        else:
            usage.require_no_spills()
            assert usage.count("fma") == 0
