"""GEMMs are checked, planned and measured once for operands that look the same, and again for all others."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels import launcher, operators
from nvfp4_sgl.cutedsl_kernels.common.arguments import ADDRESSES
from nvfp4_sgl.cutedsl_kernels.common.call import BoundCall, GemmCall
from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.plan import Pin
from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from nvfp4_sgl.errors import OperandError
from tests.sm100.binding.test_errors import VALID, WRONG, Arguments, F, G, K, Recorder, T, call, strided, weights


class KeyRecorder(Recorder):
    """Notes kernels and the whole arguments of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[KernelKey, int, tuple[int, ...]]] = []

    def launch(self, key: KernelKey, call: GemmCall, clusters: int) -> None:
        super().launch(key, call, clusters)
        self.launched.append((key, clusters, call.arguments(clusters)))


@pytest.fixture(autouse=True)
def runner() -> Iterator[KeyRecorder]:
    recorder = KeyRecorder()
    with launcher.use(recorder):
        yield recorder


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that have been bound, in order."""
    made: list[str] = []
    bind = operators.bound

    def note(op: str, *rest: Any) -> Any:
        made.append(op)
        return bind(op, *rest)

    monkeypatch.setattr(operators, "bound", note)
    return made


@pytest.mark.parametrize("op", VALID)
def test_a_call_is_bound_once_and_launched_with_the_addresses_of_its_own_operands(
    op: str, runner: KeyRecorder, bound: list[str]
) -> None:
    operands = [VALID[op]() for _ in range(3)]
    for given in operands:
        call(op, **given)
    assert bound == [op] and len(runner.launched) == 3
    for given, made, (key, clusters, arguments) in zip(operands, runner.calls, runner.launched, strict=True):
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                assert getattr(made, name).data_ptr() == value.data_ptr(), name
        assert key == runner.launched[0][0]
        # As a call of these operands alone, which nothing is kept of, would be launched.
        fields = {name: value for name, value in vars(made).items() if name != "sizes"}
        assert arguments == Call(**fields).arguments(clusters)


@pytest.mark.parametrize(
    ("op", "name", "change", "error", "message"), WRONG, ids=[f"{w[0]} {w[1]} {i}" for i, w in enumerate(WRONG)]
)
def test_a_wrong_argument_is_refused_after_right_ones(
    op: str, name: str, change: Any, error: type[OperandError], message: str, runner: KeyRecorder
) -> None:
    for _ in range(2):
        call(op)
        with pytest.raises(error, match=message):
            call(op, **{name: change(VALID[op]())})
    assert len(runner.calls) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda v: {"out": strided(v["out"], 8)},
        lambda v: {"out": torch.zeros(T, F)},
        lambda v: weights(2 * F, K, alpha=(2 * F,)) | {"out": torch.zeros(T, 2 * F, dtype=torch.bfloat16)},
        lambda v: {"row_scale": torch.ones(1)},
    ],
    ids=["stride", "dtype", "shape", "one scale"],
)
def test_other_operands_are_measured_anew(change: Any, runner: KeyRecorder, bound: list[str]) -> None:
    call("product")
    call("product", **change(VALID["product"]()))
    call("product")
    assert bound == ["product"] * 2
    (first, _, sizes), (other, _, other_sizes), (last, _, last_sizes) = runner.launched
    begin = len(ADDRESSES)
    assert first == last and sizes[begin:] == last_sizes[begin:]
    assert (first, sizes[begin:]) != (other, other_sizes[begin:])


def test_another_pin_and_another_launcher_plan_anew(runner: KeyRecorder, bound: list[str]) -> None:
    call("product")
    runner.pin = Pin(token_tile=8, split_k=2)
    call("product")
    runner.pin, runner.programmatic_launch = None, False
    call("product")
    assert len(bound) == 3
    assert [key.programmatic_launch for key, *_ in runner.launched] == [True, True, False]
    with launcher.use(KeyRecorder()):
        call("product")
    assert len(bound) == 4


def test_no_rows_are_checked_and_not_launched(runner: KeyRecorder) -> None:
    given = VALID["product"]()
    none = {name: given[name][:0] for name in ("tokens", "token_scales", "row_scale", "out")}
    for _ in range(2):
        call("product", **none)
    assert not runner.calls
    with pytest.raises(OperandError, match="out: expected shape"):
        call("product", **none | {"out": given["out"]})


def dense(operands: Arguments) -> Call:
    tensors: dict[str, Any] = {name: value for name, value in operands.items() if isinstance(value, torch.Tensor)}
    return Call(shape=KernelShape(8), **tensors)


def test_a_tensor_that_is_no_operand_is_not_kept() -> None:
    """A room that copied an operand would multiply by what it held when it was bound."""
    operands = VALID["grouped_product"]()
    made = dense(operands)
    assert BoundCall(made, B200_CLUSTERS.of(1), operands).of(operands).tensors()[1][0] is operands["out"]
    copied = dense(operands | {"alpha": torch.ones(G, F)})
    with pytest.raises(ValueError, match="alpha: expected the operand alpha, or a view of it from its first element"):
        BoundCall(copied, 1, operands)
    with pytest.raises(ValueError, match="alpha: expected the operand ones"):
        BoundCall(made, 1, {name: value for name, value in operands.items() if name != "alpha"})


def test_cuda_launches_on_the_current_stream_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[object, int]] = []
    streams = {0: 70, 1: 71}
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.__getitem__)
    kernels = SimpleNamespace(get=lambda key: lambda arguments, stream: launched.append((arguments, stream)))
    runner = launcher.CudaLauncher(cast(Any, kernels))
    out = SimpleNamespace(device=torch.device("cuda:1"))
    call = SimpleNamespace(out=out, arguments=lambda clusters: ("arguments", clusters))
    runner.launch(cast(Any, "key"), cast(Any, call), 5)
    assert launched == [(("arguments", 5), 71)]
