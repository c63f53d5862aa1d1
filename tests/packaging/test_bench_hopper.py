"""The parts of launch/bench_hopper that need no GPU: GEMMs, routes, rows, what Marlin and humming are given."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.w4a16 import operations
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from tests.packaging.checkout import ROOT
from tests.support.reference_gemms import reference_gemms

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from benchmarks import hopper, hopper_experts
from benchmarks.hopper_goals import verdict
from benchmarks.hopper_runs import Parts
from benchmarks.kernel_report import Chip
from benchmarks.peers import humming, marlin

LAYER = hopper_experts.Layer("tiny", 1, experts=9, visits=4, width=128, inner=128, limit=10.0)


def columns(line: str) -> int:
    return line.count("|")


def test_experts_of_the_models() -> None:
    flash, pro = list(hopper_experts.layers(["flash"], [2])) + list(hopper_experts.layers(["pro"], [1]))
    assert (flash.experts, flash.visits, flash.width, flash.inner) == (257, 7, 4096, 1024)
    assert flash.expert_bytes == 3 * 4096 * 1024 * 9 // 16
    assert flash.copies * flash.visits * flash.expert_bytes >= hopper.ROTATED_BYTES
    # Ours and Marlin's, all copies: far below what an H200 has.
    assert 2 * pro.copies * pro.experts * pro.expert_bytes < 60e9
    assert 2 * flash.copies * flash.experts * flash.expert_bytes < 60e9


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("tile", [8, 64])
def test_routes(tokens: int, tile: int) -> None:
    route = hopper_experts.random_route(LAYER, tokens, tile, "cpu")
    assert route.ids.dtype == route.offsets.dtype == route.counts.dtype == route.destination.dtype == torch.int32
    assert route.counts.sum() == tokens * LAYER.visits and route.counts[-1] == tokens
    assert not (route.offsets % tile).any()
    assert all(len(set(experts)) == LAYER.visits for experts in route.ids.tolist())
    taken = set()
    for expert, row in zip(route.ids.flatten().tolist(), route.destination.flatten().tolist(), strict=True):
        assert 0 <= row - int(route.offsets[expert]) < int(route.counts[expert])
        taken.add(row)
    assert len(taken) == tokens * LAYER.visits


def test_our_experts_are_checked_against_dequantised_weights() -> None:
    """On the CPU, with reference GEMMs: passes, and fails when an expert has another's scale."""
    torch.manual_seed(0)
    with reference_gemms("sm_90a"):
        weights = hopper_experts.Weights(LAYER, "cpu")
        case = hopper_experts.Case(weights, 16, "cpu")
        assert case.check() < hopper_experts.LIMIT
        weights.tiled[0][1].scale.copy_(weights.alphas.roll(1))
        weights.alphas = weights.alphas.roll(-1)
        with pytest.raises(AssertionError, match="error"):
            case.check()


def test_rows_have_the_columns_of_their_header() -> None:
    gemm = next(hopper.gemms(["flash"], [2]))
    row = hopper.Row(gemm, 16, 16, 4, 3, 5.4, 1e12, 2e13, 8.0, None, None)
    texts = [hopper.text(row, 4e12), hopper.text(replace(row, marlin_us=10.8, humming_us=5.4), 4e12)]
    assert {columns(text) for text in texts} == {columns(line) for line in hopper.HEADER.splitlines()}
    assert texts[0].endswith("| - | - | - | - |") and texts[1].endswith("| 10.8 | 2.00 | 5.4 | 1.00 |")
    expert = hopper_experts.Row(LAYER, 1, 4, 4.0, 8, 9.0, 6.0, 1e6, 1e12, 2e12, 16.0, None)
    texts = [hopper_experts.text(expert, 4e12), hopper_experts.text(replace(expert, marlin_us=48.0), 4e12)]
    assert {columns(text) for text in texts} == {columns(line) for line in hopper_experts.HEADER.splitlines()}
    assert "48.0 | 3.00 |" in texts[1]
    json.dumps([asdict(row), asdict(expert)])


CHIP = Chip("a chip", 4e12, 700e12, 1.0)


def test_goals() -> None:
    """Each goal has rows that meet it, rows that miss it, and rows of sizes to which it does not apply."""
    gemm = next(hopper.gemms(["flash"], [2]))

    def row(tokens: int, us: float, megabytes: float, marlin: float | None, rate: float = 1e12) -> hopper.Row:
        return hopper.Row(gemm, tokens, 16, 4, 3, us, megabytes * 1e12 / us, rate, 8.0, marlin, None)

    rows = [
        *(row(1, 5.0, 9.4, 6.6), row(64, 5.0, 9.4, 6.4), row(128, 5.0, 9.4, 5.1), row(1, 5.0, 1.2, 4.9)),
        *(row(16, 20.0, 64.1, None), row(16, 10.0, 20.0, None), row(16, 7.0, 20.0, None)),
        *(row(4096, 100.0, 9.4, None, 430e12), row(4095, 100.0, 9.4, None, 1e12)),
    ]
    expert = hopper_experts.Row(LAYER, 600, 2400, 8.0, 64, 9.0, 6.0, 1e6, 1e12, 419e12, 16.0, 24.0)
    lines = verdict([*(hopper.timed(CHIP, each) for each in rows), hopper.timed_experts(CHIP, expert)])
    name = f"flash, 2: {gemm.name} at"
    assert lines == [
        f"1.3 times Marlin up to 64 tokens from 8 MB: 1 of 2 rows; missed by {name} 64 (1.28)",
        f"no slower than Marlin elsewhere: 2 of 3 rows; missed by {name} 1 (0.98)",
        "80% of a copy from 64 MB: 1 of 1 rows",
        f"60% of a copy from 16 MB: 1 of 2 rows; missed by {name} 16 (0.50)",
        "60 % of bf16 products from 4096 rows (experts: 256 each): 1 of 2 rows; missed by"
        f" {LAYER.model}, {LAYER.ranks}: experts at 600 (0.60)",
    ]
    assert not verdict([])


def test_options() -> None:
    parse = hopper.options().parse_args
    assert not hopper.experts_of(parse(["--dense"]))
    assert not hopper.experts_of(parse(["--weights", "fp8"]))
    assert len(hopper.experts_of(parse(["--tp", "1", "2", "--models", "flash", "pro"]))) == 4
    with pytest.raises(SystemExit):
        hopper.main(["--experts", "--weights", "fp8"])


def test_what_fails_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    peer = marlin.Marlin(True)

    def broken() -> float:
        raise RuntimeError("no image\nfor this device")

    assert peer.attempt(broken) is None and peer.attempt(broken) is None and peer.attempt(lambda: 4.0) == 4.0
    assert capsys.readouterr().out.count("no image / for this device") == 1
    assert marlin.Marlin(False).attempt(lambda: 4.0) is None
    assert humming.Humming(True).attempt(broken) is None
    assert "humming, left out: RuntimeError" in capsys.readouterr().out
    parts = Parts()
    with parts.part("one"):
        broken()
    assert parts.failed == ["one"]


def fake_repack(b_q_weight: Tensor, perm: Tensor, size_k: int, size_n: int, num_bits: int) -> Tensor:
    """The shape that Marlin's tiles have, of the words as they come."""
    assert b_q_weight.dtype == torch.int32 and b_q_weight.is_contiguous() and not perm.numel()
    assert b_q_weight.shape == (size_k * num_bits // 32, size_n)
    return b_q_weight.reshape(size_k // 16, size_n * num_bits // 2)


@pytest.fixture
def sglang_marlin() -> Iterator[dict[str, Any]]:
    """SGLang's preparation with the parts that need CUDA replaced."""
    modules = {}
    with mock.patch.object(torch.cuda, "get_device_properties", lambda *_: mock.Mock(multi_processor_count=132)):
        for name in ("marlin_utils_fp4", "marlin_utils_fp8"):
            modules[name] = importlib.import_module(f"{marlin.QUANTIZATION}.{name}")
        with (
            mock.patch.object(modules["marlin_utils_fp4"], "gptq_marlin_repack", fake_repack, create=True),
            mock.patch.object(modules["marlin_utils_fp8"], "gptq_marlin_repack", fake_repack, create=True),
        ):
            yield modules


def nvfp4(*shape: int) -> NvFp4Tensor:
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    scales = torch.randint(0x30, 0x40, (*shape[:-1], shape[-1] // 16), dtype=torch.uint8)
    return NvFp4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.ones(shape[:-1]))


def test_dense_weights_of_marlin(sglang_marlin: dict[str, Any]) -> None:
    """As many copies as asked for, at addresses of their own; the call has the names of SGLang's function."""
    dense = marlin.Dense(nvfp4(2, 128, 256), copies=3)
    assert len(dense.copies) == 3 and all(len(copy) == 2 for copy in dense.copies)
    assert len({matrix.weight.data_ptr() for copy in dense.copies for matrix in copy}) == 6
    matrix = dense.copies[0][0]
    assert matrix.weight.shape == (16, 256) and matrix.scale.shape == (16, 128) and matrix.workspace.shape == (132,)
    assert matrix.global_scale is not None and matrix.global_scale.dtype == torch.bfloat16
    assert matrix.global_scale.tolist() == [marlin.GLOBAL_SCALE * 2.0 ** (126 - 7)]
    signature = inspect.signature(sglang_marlin["marlin_utils_fp4"].apply_fp4_marlin_linear)
    x = torch.randn(2, 3, 256).bfloat16().unbind()

    def apply(**given: Any) -> Tensor:
        signature.bind(**given)
        return torch.zeros(3, 128)

    with mock.patch.object(marlin, "_APPLY", apply):
        assert [tuple(part.shape) for part in dense.run(2, x)] == [(3, 128), (3, 128)]
        with pytest.raises(ValueError, match="its result"):
            dense.check(x)


def test_fp8_weights_of_marlin(sglang_marlin: dict[str, Any]) -> None:
    codes = torch.randint(0, 0x7F, (1, 128, 256), dtype=torch.uint8).view(torch.float8_e4m3fn)
    plain = MxFp8Tensor(codes, torch.full((1, 128, 8), 127 - 14, dtype=torch.uint8))
    (matrix,) = marlin.Dense(plain, copies=1).copies[0]
    assert matrix.weight.shape == (16, 128 * 8 // 2) and matrix.global_scale is None
    assert matrix.scale.shape == (2, 128) and (matrix.scale == 2.0 ** (120 - 14)).all()
    inspect.signature(sglang_marlin["marlin_utils_fp8"].apply_fp8_marlin_linear).bind(
        input=None, weight=None, weight_scale=None, workspace=None, size_n=128, size_k=256, bias=None
    )
    several = MxFp8Tensor(codes, torch.arange(8, dtype=torch.uint8).expand(1, 128, 8))
    with pytest.raises(ValueError, match="one for all blocks"):
        marlin.Dense(several, copies=1)


def test_experts_of_marlin(sglang_marlin: dict[str, Any]) -> None:
    """The experts that are asked for, each with its global scale."""
    weights = hopper_experts.Weights(LAYER, "cpu")
    first, *others = weights.for_marlin()
    assert len(others) == LAYER.copies - 1 and others[0].w13.data_ptr() != first.w13.data_ptr()
    assert first.w13.shape == (9, 8, 256 * 2 * 4 // 4) and first.w2.shape == (9, 8, 256)
    assert first.w13_scale.dtype == torch.float8_e4m3fn and first.w13_scale.shape == (9, 8, 256)
    assert torch.equal(first.w13[0], first.w13[3]) and not torch.equal(first.w13[0], first.w13[1])
    assert torch.equal(first.w13_alpha.float(), weights.alphas * 2.0 ** (126 - 7))
    called = {}
    with mock.patch.object(marlin, "_EXPERTS", lambda **given: called.update(given)):
        route = hopper_experts.random_route(LAYER, 5, 8, "cpu")
        first.run(torch.randn(5, 128).bfloat16(), route.ids, torch.ones(5, 4), 10.0)
    inspect.signature(importlib.import_module(marlin.FUSED_MOE).fused_marlin_moe).bind(**called)


def test_kernels_that_are_compiled_at_first(sglang_marlin: dict[str, Any]) -> None:
    """SGLang has them under these names, and its callers ask for them in these words."""
    builders = marlin._builders(dense=True, experts=True)
    assert len(builders) == 4
    for builder in builders:
        inspect.signature(builder.func).bind(*builder.args)  # type: ignore[attr-defined]
    assert operations.w4a16_expert_token_tile_for(7, 257) in (8, 16)


@dataclass(frozen=True)
class FakeConfig:
    """What humming knows of a matrix before its weights."""

    features: int
    k: int

    def to_str(self) -> str:
        return json.dumps([self.features, self.k])


def fake_schema(**given: Any) -> dict[str, Any]:
    assert given == humming.NVFP4
    return given


def fake_configure(features: int, k: int, schema: dict[str, Any], *, torch_dtype: torch.dtype) -> FakeConfig:
    assert schema == humming.NVFP4 and torch_dtype == torch.bfloat16
    return FakeConfig(features, k)


def fake_transform(config: FakeConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they come, whose shapes and dtypes are those that humming's schema asks for."""
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    assert shapes == {
        "weight": ((config.features, config.k // 8), torch.int32),
        "weight_scale": ((config.features, config.k // 16), torch.float8_e4m3fn),
        "weight_scale_2": ((1,), torch.float32),
    }
    return tensors


def fake_choose(config: FakeConfig) -> list[tuple[int, int, dict[str, int]]]:
    return [(0, 8, {"tile": 8}), (8, 16, {"tile": 16}), (16, 1 << 30, {"tile": 64})]


def fake_forward(config: FakeConfig, *, inputs: Tensor, **given: Tensor | str) -> Tensor:
    """The product with the dequantised weights, rounded to bf16."""
    weight, scale, global_scale = (given[f"weight{part}"] for part in ("", "_scale", "_scale_2"))
    assert isinstance(weight, Tensor) and isinstance(scale, Tensor) and isinstance(global_scale, Tensor)
    plain = NvFp4Tensor(weight.view(torch.uint8), scale, global_scale.expand(config.features))
    return (inputs.float() @ plain.dequantize().T).bfloat16()


@pytest.fixture
def fake_humming() -> Iterator[mock.Mock]:
    """humming as if it were installed; gives what stands for its compilation."""
    compiled = mock.Mock()
    fakes: dict[str, Any] = {
        "installed": lambda package: True,
        "_SCHEMA": fake_schema,
        "_CONFIGURE": fake_configure,
        "_CHOOSE": fake_choose,
        "_COMPILE": compiled,
        "_TRANSFORM": fake_transform,
        "_FORWARD": fake_forward,
    }
    modules = {name: mock.Mock() for name in ("humming", "humming.forward")}
    with (
        mock.patch.multiple(humming, **fakes),
        mock.patch.dict(sys.modules, modules),
    ):
        yield compiled


@mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0))
def test_the_pinned_humming_takes_what_it_is_given() -> None:
    """Its own checks of a matrix, and the names of what is called; none of its kernels runs here."""
    transform, forward = (importlib.import_module(f"humming.{name}") for name in ("transform", "forward"))
    config, plain = humming.configured(128, 256), nvfp4(128, 256)
    given = humming.tensors_of(plain.packed, plain.block_scale)
    padded = transform.check_and_pad_tensors(config, given)
    assert {name: tensor.shape for name, tensor in padded.items()} == {name: part.shape for name, part in given.items()}
    with pytest.raises(AssertionError):
        transform.check_and_pad_tensors(config, {**given, "weight_scale": given["weight_scale"].float()})
    assert list(inspect.signature(transform.transform_humming_tensors).parameters)[:2] == ["config", "tensors"]
    asked = {"config", "inputs", "weight", "weight_scale", "weight_scale_2", "locks", "tuning_config"}
    assert asked < set(inspect.signature(forward.humming_forward).parameters)
    kernels = importlib.import_module("humming.kernel.humming").HummingKernel
    assert {"layer_config", "tuning_config"} < set(inspect.signature(kernels.prepare_kernels).parameters)
    assert "layer_config" in inspect.signature(importlib.import_module("humming.tune").get_heuristics_config).parameters


def test_dense_weights_of_humming(fake_humming: mock.Mock) -> None:
    """As many copies as asked for, at addresses of their own; a wrong scale does not pass."""
    torch.manual_seed(0)
    dense = humming.Dense(nvfp4(2, 128, 256), copies=3, counts=[3, 16])
    matrices = [matrix for copy in dense.copies for matrix in copy]
    assert len(dense.copies) == 3 and len(matrices) == 6
    assert len({part.data_ptr() for matrix in matrices for part in (matrix.weight, matrix.scale, matrix.locks)}) == 18
    assert matrices[0].global_scale.tolist() == [marlin.GLOBAL_SCALE]
    assert json.loads(matrices[0].kernels) == [[0, 8, {"tile": 8}], [8, 16, {"tile": 16}]]
    x = torch.randn(2, 3, 256).bfloat16().unbind()
    dense.check(x)
    assert [tuple(part.shape) for part in dense.run(2, x)] == [(3, 128), (3, 128)]
    matrices[1].global_scale.mul_(2)
    with pytest.raises(ValueError, match="its result"):
        dense.check(x)
    codes = torch.zeros(1, 128, 256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="expected NVFP4, found FP8"):
        humming.Dense(MxFp8Tensor(codes, torch.full((1, 128, 8), 113, dtype=torch.uint8)), copies=1, counts=[1])


def test_kernels_of_humming_are_compiled_at_first(fake_humming: mock.Mock, capsys: pytest.CaptureFixture[str]) -> None:
    """Once a size, under the names that the GEMMs will ask for; one that fails leaves the others."""
    fake_humming.side_effect = [None, RuntimeError("no compiler"), None]
    peer = humming.Humming(True)
    peer.start([(128, 256), (64, 256), (128, 256), (64, 512)], [64])
    peer.wait()
    given = [call.args + tuple(call.kwargs.values()) for call in fake_humming.call_args_list]
    plain = nvfp4(64, 512)
    kernels = humming.prepare(plain.packed, plain.block_scale, counts=[64]).kernels
    assert json.loads(kernels) == [[0, 8, {"tile": 8}], [16, 1 << 30, {"tile": 64}]]
    assert given == [("[128, 256]", kernels), ("[64, 256]", kernels), ("[64, 512]", kernels)]
    printed = capsys.readouterr().out
    assert printed.count("no compiler") == 1 and "humming's kernels were ready" in printed and peer.usable


def test_humming_that_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """One line says so, and its column stays empty."""
    with mock.patch.object(humming, "installed", lambda package: False):
        peer = humming.Humming(True)
        peer.start([(128, 256)], [1])
        peer.wait()
    assert not peer.usable and peer.attempt(lambda: 4.0) is None
    assert capsys.readouterr().out == "humming, left out: the package humming-kernels is not installed\n"
    unwanted = humming.Humming(False)
    unwanted.start([(128, 256)], [1])
    assert not unwanted.usable and not capsys.readouterr().out


def test_peers_of_a_gemm(fake_humming: mock.Mock) -> None:
    """One that fails leaves the other's time."""
    operands = mock.Mock(plain=[nvfp4(2, 128, 256)], weights=[None] * 2)
    peers = hopper.Peers(marlin.Marlin(False), humming.Humming(True)).prepared(operands, [3])
    assert peers.for_marlin is None and peers.for_humming is not None and len(peers.for_humming.copies) == 2
    with mock.patch.object(hopper, "rotating", lambda runs: float(len(runs))):
        assert peers.times(torch.randn(2, 3, 256).bfloat16()) == (None, 2.0)
