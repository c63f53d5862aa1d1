"""Mistakes in reading a format are seen: each is planted into the source, and must move the log-probabilities or stop.

Log-probabilities are compared with transformers on the same checkpoint's values, decoded by NumPy.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mutation import mutated
from tests.support.oracle import cached_hf_model

TOKENS = 60
BOUND = 1e-4
"""Largest difference of a log-probability that is not a mistake."""
SIZES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 8}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from nvfp4_sgl.synthetic.tiny import write_tiny

    root = tmp_path_factory.mktemp("mutations")
    found = {}
    for format in ("nvfp4-experts", "compressed-tensors", "deepseek", "deepseek-base"):
        for names in ("original", "transformers"):
            found[f"{format}, {names}"] = root / f"{format}-{names}"
            write_tiny(found[f"{format}, {names}"], format, seed=31, names=names, **SIZES)
    return found


def error(directory: Path) -> float:
    """How far the package, as it is imported right now, is from transformers."""
    ids = torch.randint(2, 500, (TOKENS,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = cached_hf_model(directory)(ids[None]).logits[0].log_softmax(-1)
    model = importlib.import_module("nvfp4_sgl.standalone").Standalone(directory, capacity=256)
    return float((model.extend({0: ids.tolist()})[0].log_softmax(-1) - expected).abs().max())


@pytest.mark.parametrize("key", [f"{f}, original" for f in ("compressed-tensors", "deepseek", "deepseek-base")])
def test_nothing_is_seen_where_nothing_is_wrong(key: str, checkpoints: dict[str, Path]) -> None:
    assert error(checkpoints[key]) <= BOUND


DECODERS, MXFP4, E2M1 = "checkpoint.decoders", "formats.mxfp4", "formats.e2m1"
MISTAKES = {
    "global scale not inverted": (
        "compressed-tensors, original",
        DECODERS,
        'pieces.whole("weight_global_scale").reshape(()).reciprocal()',
        'pieces.whole("weight_global_scale").reshape(())',
    ),
    "global scale a power of two off": (
        "deepseek, original",
        MXFP4,
        "global_scale = ue8m0.decode((m + ue8m0.BIAS).to(torch.uint8))",
        "global_scale = ue8m0.decode((m + ue8m0.BIAS + 1).to(torch.uint8))",
    ),
    "ModelOpt's global scale inverted": (
        "nvfp4-experts, original",
        DECODERS,
        'pieces.whole("weight_scale_2").reshape(())',
        'pieces.whole("weight_scale_2").reshape(()).reciprocal()',
    ),
    "nibbles swapped": (
        "deepseek, original",
        E2M1,
        "return _values(device)[torch.stack((byte & 15, byte >> 4), dim=-1)]",
        "return _values(device)[torch.stack((byte >> 4, byte & 15), dim=-1)]",
    ),
    "MXFP4's scales laid out for halves of a row": (
        "deepseek, original",
        MXFP4,
        "block_scale.view(torch.uint8).repeat_interleave(2, dim=-1)",
        "torch.cat([block_scale.view(torch.uint8)] * 2, -1)",
    ),
    "FP8's scales by rows and columns in turn": (
        "deepseek-base, original",
        "formats.fp8_block",
        "scale = scale.repeat_interleave(BLOCK, dim=-2)[..., :n, :].repeat_interleave(BLOCK, dim=-1)[..., :k]",
        "scale = scale.repeat(BLOCK, 1)[:n].repeat(1, BLOCK)[:, :k]",
    ),
    "FP8's float scales divide": (
        "compressed-tensors, original",
        DECODERS,
        'pieces.piece("scale").float())',
        'pieces.piece("scale").float().reciprocal())',
    ),
    "gate and up by each other's names": (
        "deepseek, transformers",
        "checkpoint.transformers_names",
        '{"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}',
        '{"w1": "up_proj", "w2": "down_proj", "w3": "gate_proj"}',
    ),
    "the wrong norm by transformers' name": (
        "compressed-tensors, transformers",
        "checkpoint.transformers_names",
        '"attn_norm": "input_layernorm",\n    "ffn_norm": "post_attention_layernorm",',
        '"ffn_norm": "input_layernorm",\n    "attn_norm": "post_attention_layernorm",',
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(name: str, checkpoints: dict[str, Path]) -> None:
    key, module, old, new = MISTAKES[name]
    cached_hf_model(checkpoints[key])  # before anything is broken
    with mutated(module, old, new):
        assert error(checkpoints[key]) > 100 * BOUND


IGNORED = {
    "ignore is ignored": (
        "compressed-tensors, original",
        "return lambda spec: targets.fit(spec.name) and kept(spec) and not _any_fits(earlier, spec)",
        "return lambda spec: targets.fit(spec.name) and not _any_fits(earlier, spec)",
    ),
    "patterns of ModelOpt's ignore fit nothing": (
        "nvfp4-experts, original",
        "return Wildcards(_strings(claims, _ignore_field(claims.raw), _ignore_value(claims.raw)))",
        "return Wildcards([])",
    ),
}


@pytest.mark.parametrize("name", IGNORED)
def test_exceptions_that_are_not_made_stop_the_load(name: str, checkpoints: dict[str, Path]) -> None:
    key, old, new = IGNORED[name]
    with mutated("checkpoint.exporters", old, new):
        errors = importlib.import_module("nvfp4_sgl.errors")
        with pytest.raises(errors.ConfigError, match="config_groups"):
            importlib.import_module("nvfp4_sgl.checkpoint.verified").verify(checkpoints[key])


def test_a_matrix_that_is_not_exact_never_passes_for_one(checkpoints: dict[str, Path]) -> None:
    """With the check gone, the conversion itself refuses."""
    import torch as t

    with mutated(DECODERS, "return formats.mxfp4.why_not_exact(int(low), int(high))", "return None"):
        decoders = importlib.import_module("nvfp4_sgl.checkpoint.decoders")
        errors = importlib.import_module("nvfp4_sgl.errors")
        weight = t.full((1, 32), 0x22, dtype=t.int8)
        scale = t.tensor([[100, 118]], dtype=t.uint8).view(t.float8_e8m0fnu)
        with pytest.raises(errors.OperandValueError, match="spread too wide"):
            decoders.MxFp4AsNvFp4().decode(_Whole({"weight": weight, "scale": scale}))


class _Whole:
    """All of a matrix."""

    def __init__(self, parts: dict[str, torch.Tensor]):
        self._parts = parts

    def piece(self, part: str) -> torch.Tensor:
        return self._parts[part]

    whole = piece
