"""What a Hopper GPU is said to run exists, and what it does not have is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.ops import dispatch
from nvfp4_sgl.ops.dispatch import ACTIVATION_MODES, STAND_INS, Target
from nvfp4_sgl.serving import arguments

GIVEN = {"device": None, "dtype": "auto", "kv_cache_dtype": "auto"}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "detect_target", lambda: Target.SM90)


def test_every_implementation_exists():
    found = dispatch.load_implementations(Target.SM90)
    assert set(found) == set(dispatch.op_names())
    assert all(where.__module__.startswith(("nvfp4_sgl.triton_kernels.", "nvfp4_sgl.gpu.")) for where in found.values())
    assert "dequantised" in STAND_INS[Target.SM90]


def test_a_target_without_products_is_refused():
    with pytest.raises(UnsupportedError, match=r"sm_100a: no implementation of rms_norm, .*sm_90a are complete"):
        dispatch.load_implementations(Target.SM100)
    assert not ACTIVATION_MODES[Target.SM100]


@pytest.mark.parametrize(
    ("given", "config", "message"),
    [
        ({"dtype": "float32"}, {}, "--dtype float32: expected one of auto, bfloat16 on sm_90a"),
        ({"kv_cache_dtype": "bfloat16"}, {}, "--kv-cache-dtype bfloat16: expected one of auto, fp8_e4m3 on sm_90a"),
        ({"device": "cpu"}, {}, "--device cpu: this machine's target is sm_90a"),
        ({}, {"activation_mode": "w4a4"}, "activation_mode 'w4a4': on sm_90a expected one of w4a16"),
    ],
)
def test_options_that_a_gpu_does_not_have(given: Any, config: Any, message: str, hopper: None):
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        arguments.check_target(GIVEN | given, config)


def test_options_that_it_has(hopper: None):
    arguments.check_target(GIVEN, {})
    arguments.check_target({"device": "cuda", "dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, {})
