"""Keys, cache, plans, warm-up: which kernel runs, and that it is made once."""

from __future__ import annotations

import inspect
import threading
import time
from dataclasses import dataclass, fields, replace
from itertools import product as every_pair
from typing import Any, Literal

import pytest
import torch

from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels import compiled, launcher, plan, warm_up
from nvfp4_sgl.cutedsl_kernels.common.arguments import Arguments
from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS
from nvfp4_sgl.cutedsl_kernels.common.shape import TOKEN_TILES, Output
from nvfp4_sgl.cutedsl_kernels.compiled import KernelCache, KernelKey, compile_kernel
from nvfp4_sgl.cutedsl_kernels.mxfp8 import operations as mxfp8_operations
from nvfp4_sgl.cutedsl_kernels.mxfp8.operand import MxFp8Weights
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.formats.nvfp4 import swiglu_row_scale
from nvfp4_sgl.formats.rows import MxFp8Rows
from nvfp4_sgl.formats.scale_layout import layout_tile
from nvfp4_sgl.weights.gemms import distinct_gemms
from tests.sm100.support.launcher import emulated_operations
from tests.support.released import FLASH, PRO, config_json

LIMIT = 10.0
PLAIN = KernelKey("sm_100a", KernelShape(8))
GATED = KernelKey("sm_100a", KernelShape(8, gated=True, grouped=True, output="nvfp4"), LIMIT)


def test_the_host_function_takes_the_arguments_in_their_order() -> None:
    from nvfp4_sgl.cutedsl_kernels.common.entry import Entry

    assert tuple(inspect.signature(Entry.__call__).parameters) == ("self", *Arguments._fields, "stream")


def test_every_part_of_a_key_names_another_kernel() -> None:
    changes: dict[str, Any] = {
        "architecture": "sm_103a",
        "shape": KernelShape(16),
        "weighted": True,
        "programmatic_launch": False,
    }
    assert {*changes, "limit"} == {field.name for field in fields(KernelKey)}
    others = [replace(PLAIN, **{name: value}) for name, value in changes.items()]
    names = {key.name for key in (PLAIN, *others, GATED, replace(GATED, limit=7.0))}
    assert len(names) == len(others) + 3
    assert all(name.isidentifier() for name in names)
    assert KernelKey("sm_100a", KernelShape(8)).name == PLAIN.name


def test_launches_are_programmatic_dependents_unless_told_otherwise() -> None:
    assert launcher.CudaLauncher().programmatic_launch and PLAIN.programmatic_launch
    assert launcher.CudaLauncher(programmatic_launch=False).programmatic_launch is False


def test_keys_that_make_no_sense() -> None:
    with pytest.raises(OperandValueError, match="architecture: expected one of .*found 'sm_80'"):
        replace(PLAIN, architecture="sm_80")
    with pytest.raises(OperandValueError, match="limit: expected one for gated kernels only"):
        replace(PLAIN, limit=LIMIT)
    with pytest.raises(OperandValueError, match="limit"):
        replace(GATED, limit=None)


@pytest.mark.parametrize("limit", [0.5, 7.0, 10.0])
def test_the_hidden_row_scale_is_that_of_the_reference(limit: float) -> None:
    assert replace(GATED, limit=limit).row_scale_constant == swiglu_row_scale(limit)


def test_threads_share_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def slow(key: KernelKey) -> object:
        time.sleep(0.05)
        made.append(key)
        return object()

    monkeypatch.setattr(compiled, "compile_kernel", slow)
    monkeypatch.setattr(compiled.NativeKernel, "of", lambda name, function: function)
    cache, found = KernelCache(), []
    threads = [threading.Thread(target=lambda: found.append(cache.get(PLAIN))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [PLAIN] and len(found) == 8 and len(set(found)) == 1


@pytest.mark.parametrize(
    "shape",
    [
        KernelShape(16, split_k=4),
        KernelShape(256, pair=True, output="fp32"),
        KernelShape(32, gated=True, grouped=True, output="nvfp4"),
    ],
    ids=str,
)
def test_kernels_compile_for_sm_103a(shape: KernelShape) -> None:
    key = KernelKey("sm_103a", shape, LIMIT if shape.gated else None)
    assert compile_kernel(key).function_name


ROWS = (1, 8, 9, 60, 64, 65, 128, 129, 300, 4096)
PROJECTIONS = ((128, 64), (1024, 4096), (7168, 2048), (32768, 1536))


@pytest.mark.parametrize("token_tile", TOKEN_TILES)
def test_plans_read_the_layout_they_are_given(token_tile: int) -> None:
    """Whatever the choice would be: the layout is the rows', and expert tiles divide the alignment of offsets."""
    keys = {key.shape for key in plan.every_key("sm_100a", LIMIT)}
    for rows, (features, k) in every_pair(ROWS, PROJECTIONS):
        shapes = [
            plan.plan_gemm(features, k, rows, 1, token_tile, "bf16", B200_CLUSTERS),
            plan.plan_gated(features, k, rows, token_tile, "nvfp4", B200_CLUSTERS),
            plan.plan_experts(features, k, rows, 64, True, token_tile, "nvfp4", B200_CLUSTERS),
            plan.plan_experts(features, k, rows, 64, False, token_tile, "bf16", B200_CLUSTERS),
        ]
        for shape in shapes:
            assert layout_tile(shape.token_tile) == layout_tile(token_tile)
            assert not shape.grouped or token_tile % shape.token_tile == 0
            assert shape in keys


@pytest.mark.parametrize("base", [FLASH, PRO], ids=["flash", "pro"])
def test_a_library_of_every_kernel_serves_a_model(base: dict) -> None:
    products = distinct_gemms(ModelConfig.from_dict(config_json(base)), ranks=4)
    keys = warm_up.keys_for(products, 4096, LIMIT, "sm_103a", B200_CLUSTERS)
    everything = plan.every_key("sm_103a", LIMIT, ("bf16", "fp32"))
    assert len(keys) > 10 and set(keys) <= set(everything)
    assert len({key.name for key in everything}) == len(everything)


@dataclass(frozen=True)
class Size:
    features: int
    k: int
    groups: int = 1
    gated: bool = False
    experts_per_token: int = 0
    output: Output = "bf16"
    kind: Literal["nvfp4", "mxfp8", "bf16"] = "nvfp4"


def test_operations_ask_for_what_warm_up_ran() -> None:
    """The same plans, seen from both sides: nothing is compiled after a warm-up."""
    from tests.sm100.binding.test_errors import VALID, E, F, G, K, Recorder, T

    class KeyRecorder(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.keys: list[KernelKey] = []

        def launch(self, key: KernelKey, call: object, clusters: int) -> None:
            self.keys.append(key)

    recorder = KeyRecorder()
    with launcher.use(recorder):
        for op in ("product", "grouped_product"):
            arguments = VALID[op]()
            tile = plan.token_tile_for(T)
            groups = G if op == "grouped_product" else 1
            scales = torch.zeros(warm_up.scale_bytes(T, K * groups, tile), dtype=torch.uint8)
            arguments |= {"token_tile": tile, "token_scales": scales.view(torch.float8_e4m3fn)}
            getattr(torch.ops.nvfp4_sgl, op)(**arguments)
        for op in ("expert_gate_up", "expert_down"):
            getattr(torch.ops.nvfp4_sgl, op)(**VALID[op]() | {"counts_ahead": True})
        rows = MxFp8Rows.allocate(T, K, plan.token_tile_for(T), "cpu")
        codes, scale = torch.zeros(2, F, K, dtype=torch.uint8), torch.zeros(2, F, K // 32, dtype=torch.uint8)
        weights = MxFp8Tensor(codes.view(torch.float8_e4m3fn), scale)
        mxfp8_operations.gate_up(rows, MxFp8Weights.gated(weights), LIMIT)
        mxfp8_operations.product(rows, MxFp8Weights.of(MxFp8Tensor(weights.codes[0], scale[0])))
    assert {key.shape.operands for key in recorder.keys} == {"nvfp4", "mxfp8"}
    pairs = 2
    sizes = [Size(F, K), Size(F, K, G), Size(F, K, E, True, pairs, "nvfp4"), Size(F, K, E, False, pairs)]
    sizes += [Size(F, K, gated=True, kind="mxfp8"), Size(F, K, kind="mxfp8"), Size(F, K, kind="bf16")]
    assert set(recorder.keys) <= set(warm_up.keys_for(sizes, T, LIMIT, "sm_100a", B200_CLUSTERS, weighted=True))


def test_warm_up_runs_each_kernel_once() -> None:
    keys = [PLAIN, GATED, KernelKey("sm_100a", KernelShape(8, grouped=True), weighted=True)]
    keys.append(KernelKey("sm_100a", KernelShape(8, split_k=2)))
    keys.append(KernelKey("sm_100a", KernelShape(8, gated=True, operands="mxfp8"), LIMIT))
    with emulated_operations() as runner:
        warm_up.warm_up(keys, torch.device("cpu"))
    assert runner.keys == keys
