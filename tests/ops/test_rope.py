"""What the reference remembers of a pass must never serve another one."""

from __future__ import annotations

import torch

from nvfp4_sgl.ops.rope import apply_rope


def expected(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """The rotation of section 3.2 written out, on the last dimensions."""
    angle = positions.float()[:, None] * frequencies
    a, b = x[:, -8::2], x[:, -7::2]
    turned = torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).flatten(1)
    return torch.cat((x[:, :-8], turned), 1)


def test_other_frequencies_and_changed_positions_are_noticed():
    generator = torch.Generator().manual_seed(1)
    x, positions = torch.randn(5, 12, generator=generator), torch.arange(5)
    for _ in range(20):  # freed tables, whose addresses Python uses again
        frequencies = torch.rand(4, generator=generator)
        assert torch.allclose(apply_rope(x, positions, frequencies), expected(x, positions, frequencies), atol=1e-6)
        del frequencies
    frequencies = torch.rand(4, generator=generator)
    apply_rope(x, positions, frequencies)
    positions += 7
    assert torch.allclose(apply_rope(x, positions, frequencies), expected(x, positions, frequencies), atol=1e-6)


def test_inference_tensors():
    with torch.inference_mode():
        x, positions, frequencies = torch.randn(5, 12), torch.arange(5), torch.rand(4)
        apply_rope(x, positions, frequencies)
        positions += 7
        assert torch.allclose(apply_rope(x, positions, frequencies), expected(x, positions, frequencies), atol=1e-6)
