"""Wrong arguments: an error that names the argument, what was expected and what was found, and never a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.common.call import GemmCall
from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS, Clusters
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.errors import ArchitectureError
from nvfp4_sgl.cutedsl_kernels.plan import Pin
from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.w4a4 import custom_ops  # noqa: F401
from nvfp4_sgl.cutedsl_kernels.w4a4.operand import Weights
from nvfp4_sgl.errors import OperandError, OperandTypeError, OperandValueError
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.formats.scale_layout import scale_bytes
from tests.support.reference_gemms import dry_gemms

E4M3 = torch.float8_e4m3fn
T, F, K, G, E, TILE = 24, 64, 128, 2, 3, 8
Arguments = dict[str, Any]


class Recorder:
    """A launcher that only notes what it is asked to launch."""

    programmatic_launch = True
    pin: Pin | None = None

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def architecture(self, device: torch.device) -> str:
        return "sm_100a"

    def clusters(self, device: torch.device) -> Clusters:
        return B200_CLUSTERS

    def freeze(self) -> None:
        pass

    def launch(self, key: KernelKey, call: GemmCall, clusters: int) -> None:
        assert isinstance(call, Call)
        self.calls.append(call)


@pytest.fixture(autouse=True)
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    with launcher.use(recorder):
        yield recorder


def block_scales(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8).view(E4M3)


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def rows(groups: int = 0) -> Arguments:
    shape = (T, groups, K // 2) if groups else (T, K // 2)
    return {
        "tokens": codes(*shape),
        "token_scales": block_scales(scale_bytes(T, K * max(groups, 1), TILE)),
        "row_scale": torch.ones(shape[:-1]),
        "token_tile": TILE,
    }


def weights(*shape: int, alpha: tuple[int, ...]) -> Arguments:
    matrices = torch.Size(shape[:-2]).numel()
    return {
        "weights": codes(*shape[:-1], shape[-1] // 2),
        "weight_scales": block_scales(matrices * scale_bytes(*shape[-2:])),
        "alpha": torch.ones(alpha),
    }


def experts() -> Arguments:
    return {
        "offsets": torch.arange(0, T, 8, dtype=torch.int32),
        "counts": torch.tensor([3, 0, 8], dtype=torch.int32),
        "counts_ahead": False,
    }


def bf16(*shape: int) -> Arguments:
    return {"out": torch.zeros(*shape, dtype=torch.bfloat16)}


VALID: dict[str, Callable[[], Arguments]] = {
    "product": lambda: rows() | weights(F, K, alpha=(F,)) | bf16(T, F),
    "grouped_product": lambda: rows(G) | weights(G, F, K, alpha=(G, F)) | bf16(T, G, F),
    "expert_gate_up": lambda: (
        rows()
        | experts()
        | weights(E, 2 * F, K, alpha=(E, 2))
        | {"limit": 10.0, "out": codes(T, F // 2), "out_scales": block_scales(scale_bytes(T, F, TILE))}
    ),
    "expert_down": lambda: (
        rows() | experts() | weights(E, F, K, alpha=(E,)) | bf16(T, F) | {"row_weight": torch.ones(T)}
    ),
}


def call(op: str, **changes: Any) -> None:
    getattr(torch.ops.nvfp4_sgl, op)(**(VALID[op]() | changes))


@pytest.mark.parametrize("op", VALID)
def test_valid_arguments_are_launched_once(op: str, recorder: Recorder) -> None:
    call(op)
    assert len(recorder.calls) == 1


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same contents, four bytes past an aligned address."""
    size = tensor.element_size()
    buffer = torch.zeros(tensor.numel() + 16, dtype=torch.uint8 if size == 1 else tensor.dtype)
    start = (-buffer.data_ptr() % 16 + 4) // size
    return buffer[start : start + tensor.numel()].view(tensor.dtype).view(tensor.shape)


def strided(tensor: torch.Tensor, padding: int) -> torch.Tensor:
    """The same shape, rows ``padding`` elements further apart."""
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + padding, dtype=tensor.dtype)
    return wide[..., : tensor.shape[-1]]


WRONG: list[tuple[str, str, Callable[[Arguments], Any], type[OperandError], str]] = [
    ("product", "tokens", lambda v: v["tokens"].view(torch.int8), OperandTypeError, "torch.uint8, found torch.int8"),
    ("product", "tokens", lambda v: v["tokens"][0], OperandValueError, r"\[rows, K/2\], found \(64,\)"),
    ("product", "tokens", lambda v: codes(T, 40), OperandValueError, "multiple of 64 .*found 80"),
    ("product", "tokens", lambda v: codes(T, 0), OperandValueError, "positive multiple of 64 .*found 0"),
    ("product", "tokens", lambda v: codes(K // 2, T).t(), OperandValueError, "last dimension to be contiguous"),
    ("product", "tokens", lambda v: strided(v["tokens"], 8), OperandValueError, "of 16 bytes, found 72 elements"),
    ("product", "tokens", lambda v: misaligned(v["tokens"]), OperandValueError, "address that is a multiple of 16"),
    ("product", "token_scales", lambda v: v["token_scales"].view(torch.uint8), OperandTypeError, "found torch.uint8"),
    ("product", "token_scales", lambda v: v["token_scales"][:-1], OperandValueError, "3072 bytes .*found 3071"),
    ("product", "token_scales", lambda v: v["token_scales"][::2], OperandValueError, "contiguous"),
    ("product", "token_scales", lambda v: misaligned(v["token_scales"]), OperandValueError, "address"),
    ("product", "token_tile", lambda v: 24, OperandValueError, r"one of \(8, 16.*found 24"),
    ("product", "row_scale", lambda v: v["row_scale"].bfloat16(), OperandTypeError, "found torch.bfloat16"),
    ("product", "row_scale", lambda v: torch.ones(T + 1), OperandValueError, r"found \(25,\)"),
    ("product", "row_scale", lambda v: torch.ones(T, device="meta"), OperandValueError, "device cpu.*found meta"),
    ("product", "weights", lambda v: v["weights"].view(torch.int8), OperandTypeError, "found torch.int8"),
    ("product", "weights", lambda v: codes(F, 32), OperandValueError, "K that of tokens, found"),
    ("product", "weights", lambda v: codes(1, F, 64), OperandValueError, r"\[features, K/2\], found \(1, 64, 64\)"),
    ("product", "weights", lambda v: codes(0, 64), OperandValueError, "at least one feature"),
    ("product", "weights", lambda v: strided(v["weights"], 16), OperandValueError, "contiguous"),
    ("product", "weights", lambda v: misaligned(v["weights"]), OperandValueError, "address"),
    ("product", "weights", lambda v: codes(F, 64).to("meta"), OperandValueError, "device cpu, that of out, found meta"),
    ("product", "weight_scales", lambda v: block_scales(512), OperandValueError, "expected 1024 bytes .*found 512"),
    ("product", "weight_scales", lambda v: torch.zeros(1024), OperandTypeError, "found torch.float32"),
    ("product", "weight_scales", lambda v: misaligned(v["weight_scales"]), OperandValueError, "address"),
    ("product", "alpha", lambda v: torch.ones(1), OperandValueError, r"\[features\], found \(1,\)"),
    ("product", "alpha", lambda v: v["alpha"].double(), OperandTypeError, "found torch.float64"),
    ("product", "alpha", lambda v: torch.ones(1).expand(F), OperandValueError, "contiguous"),
    ("product", "out", lambda v: v["out"].half(), OperandTypeError, "bfloat16 or torch.float32, found torch.float16"),
    ("product", "out", lambda v: v["out"][:-1], OperandValueError, r"found \(23, 64\)"),
    ("product", "out", lambda v: strided(v["out"], 4), OperandValueError, "found 68 elements of 2 bytes"),
    ("product", "out", lambda v: misaligned(v["out"]), OperandValueError, "address"),
    ("grouped_product", "tokens", lambda v: codes(T, K // 2), OperandValueError, r"\[rows, groups, K/2\]"),
    ("grouped_product", "tokens", lambda v: codes(T, 3, K // 2), OperandValueError, "token_scales"),
    ("grouped_product", "weights", lambda v: codes(3, F, K // 2), OperandValueError, r"found \(3, 64, 64\)"),
    ("grouped_product", "alpha", lambda v: torch.ones(G), OperandValueError, r"\[groups, features\], found \(2,\)"),
    ("grouped_product", "row_scale", lambda v: torch.ones(T), OperandValueError, r"\[rows, groups\]"),
    ("grouped_product", "out", lambda v: bf16(T, F, G)["out"], OperandValueError, r"found \(24, 64, 2\)"),
    ("expert_gate_up", "offsets", lambda v: v["offsets"].long(), OperandTypeError, "torch.int32, found torch.int64"),
    ("expert_gate_up", "offsets", lambda v: v["offsets"][:2], OperandValueError, r"\[experts\], found \(2,\)"),
    ("expert_gate_up", "offsets", lambda v: None, OperandTypeError, "offsets and counts or neither"),
    ("expert_gate_up", "counts", lambda v: None, OperandTypeError, "offsets and counts or neither"),
    ("expert_gate_up", "counts", lambda v: v["counts"].repeat(2)[::2], OperandValueError, "contiguous"),
    ("expert_gate_up", "weights", lambda v: codes(E, 2, F, K // 2), OperandValueError, r"found \(3, 2, 64, 64\)"),
    ("expert_gate_up", "weights", lambda v: codes(E, 48, K // 2), OperandValueError, "multiple of 32 .*found 48"),
    ("expert_gate_up", "alpha", lambda v: torch.ones(E), OperandValueError, r"\[experts, gate and up\]"),
    ("expert_gate_up", "limit", lambda v: 0.1, OperandValueError, "from 0.2785"),
    ("expert_gate_up", "limit", lambda v: float("nan"), OperandValueError, "found nan"),
    ("expert_gate_up", "out", lambda v: bf16(T, F)["out"], OperandTypeError, "with out_scales: NVFP4 codes"),
    ("expert_gate_up", "out", lambda v: codes(T, F), OperandValueError, r"\[rows, features/2\]"),
    ("expert_gate_up", "out_scales", lambda v: None, OperandTypeError, "out: expected dtype torch.bfloat16 or"),
    ("expert_gate_up", "out_scales", lambda v: block_scales(512), OperandValueError, "expected 1536 bytes .*found 512"),
    ("expert_down", "row_weight", lambda v: torch.ones(T - 1), OperandValueError, r"found \(23,\)"),
    ("expert_down", "row_weight", lambda v: torch.ones(T).bfloat16(), OperandTypeError, "found torch.bfloat16"),
    ("expert_down", "alpha", lambda v: torch.ones(F), OperandValueError, r"\[experts\], found \(64,\)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "name", "change", "error", "message"), WRONG, ids=[f"{w[0]} {w[1]} {i}" for i, w in enumerate(WRONG)]
)
def test_a_wrong_argument_is_named(
    op: str,
    name: str,
    change: Callable[[Arguments], Any],
    error: type[OperandError],
    message: str,
    recorder: Recorder,
) -> None:
    with pytest.raises(error, match=message) as caught:
        call(op, **{name: change(VALID[op]())})
    assert str(caught.value).startswith(f"{op}: ") or name == "limit"
    assert not recorder.calls


def test_experts_without_offsets_are_one() -> None:
    with pytest.raises(OperandTypeError, match="expert_down: offsets: expected a tensor, since there are 3 experts"):
        call("expert_down", offsets=None, counts=None)


def test_only_counts_that_there_are_can_be_ready(recorder: Recorder) -> None:
    one = weights(1, F, K, alpha=(1,)) | {"offsets": None, "counts": None}
    with pytest.raises(OperandValueError, match="counts_ahead: expected False without offsets and counts, found True"):
        call("expert_down", **one, counts_ahead=True)
    call("expert_down", **one)
    call("expert_down", counts_ahead=True)
    assert [made.shape.counts_ahead for made in recorder.calls] == [False, True]


def test_there_are_at_most_512_experts() -> None:
    many = weights(513, 8, K, alpha=(513,)) | {"offsets": torch.zeros(513, dtype=torch.int32)}
    with pytest.raises(OperandValueError, match="1 to 512 experts, found 513"):
        call("expert_down", **many, counts=many["offsets"], out=bf16(T, 8)["out"])


@pytest.mark.parametrize(("dtype", "features", "multiple"), [(torch.bfloat16, 68, 8), (torch.float32, 70, 4)])
def test_a_row_of_output_is_whole_16_bytes(dtype: torch.dtype, features: int, multiple: int) -> None:
    """Also where rows are further apart: a store would write into the padding, or past the end."""
    out = torch.zeros(T, 80, dtype=dtype)[:, :features]
    with pytest.raises(OperandValueError, match=f"out: expected features to be a positive multiple of {multiple}"):
        call("product", **weights(features, K, alpha=(features,)), out=out)


def test_nvfp4_output_has_whole_rows_of_16_bytes() -> None:
    with pytest.raises(OperandValueError, match="features to be a positive multiple of 32 .*found 48"):
        call("expert_gate_up", **weights(E, 2 * 48, K, alpha=(E, 2)), out=codes(T, 24))


class TestArchitecture:
    """The launcher for CUDA, asked about devices that have no kernels."""

    def test_a_cpu_tensor(self) -> None:
        with (
            launcher.use(launcher.CudaLauncher()),
            pytest.raises(ArchitectureError, match="cpu.*sm_90a, sm_100a, sm_103a"),
        ):
            call("product")

    @pytest.mark.parametrize(("capability", "found"), [((12, 0), "sm_120"), ((8, 0), "sm_80")])
    def test_another_gpu(self, capability: tuple[int, int], found: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launcher, "_describe", lambda index: (capability, "NVIDIA X"))
        with pytest.raises(ArchitectureError, match=rf"cuda:0.*or sm_103a, found {found} \(NVIDIA X\)"):
            launcher.CudaLauncher().architecture(torch.device("cuda:0"))

    def test_hopper_is_sent_to_its_own_operations(self) -> None:
        with dry_gemms("sm_90a"):
            match = "expected sm_100a or sm_103a for NVFP4 activations, found sm_90a"
            with pytest.raises(ArchitectureError, match=match):
                call("product")

    @pytest.mark.parametrize(("capability", "name"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")])
    def test_ours(self, capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launcher, "_describe", lambda index: (capability, "NVIDIA B200"))
        assert launcher.CudaLauncher().architecture(torch.device("cuda:0")) == name


class TestWeights:
    """Constructors check once, when a model is loaded."""

    @staticmethod
    def plain(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8).view(E4M3)

    def test_block_scales_fit_the_codes(self) -> None:
        with pytest.raises(OperandValueError, match=r"block_scales: expected shape \(64, 8\).*found \(64, 4\)"):
            Weights.dense(codes(F, K // 2), self.plain(F, 4), torch.ones(1))

    def test_k_is_a_multiple_of_64(self) -> None:
        with pytest.raises(OperandValueError, match="codes: expected K to be a positive multiple of 64 .*found 32"):
            Weights.dense(codes(F, 16), self.plain(F, 2), torch.ones(1))

    def test_alpha_is_one_value_or_one_a_feature(self) -> None:
        with pytest.raises(OperandValueError, match=r"alpha: .*\(64,\), found shape \(3,\)"):
            Weights.dense(codes(F, K // 2), self.plain(F, K // 16), torch.ones(3))

    def test_alpha_of_gated_experts(self) -> None:
        with pytest.raises(OperandValueError, match=r"alpha: expected shape \(3, 2\) = \[E, 2\], found \(3,\)"):
            Weights.gated_experts(codes(E, 2, F, K // 2), self.plain(E, 2, F, K // 16), torch.ones(E))

    def test_gate_and_up(self) -> None:
        with pytest.raises(OperandValueError, match=r"codes: expected shape \(3, 2, 64, 64\)"):
            Weights.gated_experts(codes(E, 3, F, K // 2), self.plain(E, 3, F, K // 16), torch.ones(E, 2))

    def test_gates_and_ups_alternate_by_16(self) -> None:
        with pytest.raises(OperandValueError, match="features: expected I to be a positive multiple of 16 .*found 24"):
            Weights.gated_experts(codes(E, 2, 24, K // 2), self.plain(E, 2, 24, K // 16), torch.ones(E, 2))

    def test_an_expert_that_does_not_fit(self) -> None:
        weights = Weights.allocate_gated_experts(E, F, K, torch.device("cpu"))
        whole = codes(2, F, K // 2), self.plain(2, F, K // 16), torch.ones(2)
        weights.put_gated_expert(0, *whole)
        with pytest.raises(OperandValueError, match=r"codes: expected shape \(2, 64, 64\) = \[2, I, K/2\]"):
            weights.put_gated_expert(0, codes(2, 32, K // 2), *whole[1:])
        with pytest.raises(OperandValueError, match=r"block_scales: expected shape \(2, 64, 8\) = \[2, I, K/16\]"):
            weights.put_gated_expert(0, whole[0], self.plain(2, F, 4), whole[2])
        with pytest.raises(OperandValueError, match=r"alpha: expected 2 values, found shape \(1,\)"):
            weights.put_gated_expert(0, *whole[:2], torch.ones(1))

    def test_dtypes(self) -> None:
        with pytest.raises(OperandTypeError, match="codes: expected dtype torch.uint8, found torch.float32"):
            Weights.experts(torch.zeros(E, F, K // 2), self.plain(E, F, K // 16), torch.ones(E))


def test_a_token_tile_that_does_not_exist() -> None:
    with pytest.raises(OperandError, match="token_tile: .*found 12"):
        Rows(codes(T, K // 2), block_scales(0), torch.ones(T), 12)
