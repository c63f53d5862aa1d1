"""Sums of a step, inboxes, comparison of logits and report of launch/bench_rank_sums."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its packages are imported by bare name
from benchmarks import rank_sums
from benchmarks.rank_sums import KINDS, Sums, line

from nvfp4_sgl.targets.fused.exchange import lone_exchange
from nvfp4_sgl.targets.fused.gemm_planner import GemmPlanner
from nvfp4_sgl.triton_kernels.common.inbox import empty_inbox
from nvfp4_sgl.weights.parallel import Collective, TensorParallel


@dataclass(frozen=True)
class Shared:
    """Stands for a decoder's context."""

    parallel: TensorParallel


class Communicator:
    """Doubles what it is given, as the sum of two equal ranks; takes no more than four tokens."""

    captures = 0

    def custom_all_reduce(self, part: torch.Tensor) -> torch.Tensor | None:
        return 2 * part if len(part) <= 4 else None

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.captures += 1
        yield


def test_a_step_has_the_sums_of_its_kind() -> None:
    reduced, exchange = Communicator(), lone_exchange(2, 8, torch.device("cpu"))
    assert exchange is not None
    sums, part = Sums(reduced, exchange), torch.ones(4, 8)
    context = Shared(TensorParallel(1, 2, sums))
    model: Any = SimpleNamespace(decoder=SimpleNamespace(context=context), planner=SimpleNamespace(context=context))
    for kind, factor in zip(KINDS, (2, 2, 1), strict=True):
        with sums.use(kind, model):
            parallel = model.decoder.context.parallel
            assert model.planner.context.parallel is parallel
            assert parallel.exchange is (exchange if kind == "pushed" else None)
            # Of a place whose kernel does not push, too.
            assert torch.equal(parallel.all_reduce(Collective.ATTENTION_OUTPUT, part), factor * part), kind
            assert (parallel.rank, parallel.size) == (1, 2)
    assert reduced.captures == 1
    sums.use("all-reduce", model)
    with pytest.raises(AssertionError, match="takes no"):
        sums(Collective.EXPERT_OUTPUT, torch.ones(5, 8))


def test_sglang_s_all_reduce_is_made_outside_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's check of GPUs would ask for its group of all ranks, which a server alone forms."""
    from sglang.srt.distributed.device_communicators import custom_all_reduce, custom_all_reduce_utils

    class Made:
        disabled = False

        def __init__(self, group: Any, device: torch.device) -> None:
            assert custom_all_reduce_utils.can_p2p(0, 2)

    monkeypatch.setenv("SGLANG_SKIP_P2P_CHECK", "")
    monkeypatch.delenv("SGLANG_SKIP_P2P_CHECK")
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: True)
    monkeypatch.setattr(custom_all_reduce, "dispatch_custom_allreduce", lambda **given: Made)
    group: Any = None
    assert isinstance(rank_sums.communicator(group, torch.device("cuda", 0)), Made)


def test_the_kernels_of_every_step_are_compiled_before_it_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is compiled in a graph ends it, one that is compiled in a step is timed. An exchange chooses kernels."""
    inboxes = [empty_inbox(2, 4, 8, "cpu") for _ in range(2)]
    context = Shared(TensorParallel())
    planner = create_autospec(GemmPlanner, instance=True)
    planner.context = context
    decoder, table, measured, compiled = SimpleNamespace(context=context), object(), list[str](), list[Any]()
    model: Any = SimpleNamespace(decoder=decoder, planner=planner, table=table)

    def standalone(*_: Any, parallel: TensorParallel, **given: Any) -> Any:
        decoder.context = planner.context = Shared(parallel)
        return model

    def note(of: Any, slots: Any, tokens: int) -> None:
        assert (of, slots) == (decoder, table) and tokens >= rank_sums.FLASH_PROMPT
        compiled.append((planner.context.parallel.exchange, decoder.context.parallel.exchange))

    def measure(of: Any, sums: Sums, requests: int) -> tuple[dict[str, list[float]], float]:
        for kind in KINDS:
            sums.use(kind, of)
            needed = of.planner.context.parallel.exchange
            assert (needed is None) is (kind != "pushed") and (needed, needed) in compiled, kind
            measured.append(kind)
        return {kind: [1.0] for kind in KINDS}, 0.0

    planner.compile_missing.side_effect = note
    replaced: dict[str, Any] = {
        "communicator": lambda *_: Communicator(),
        "write_flash": lambda *_: tmp_path,
        "verify_dummy": lambda _: SimpleNamespace(config=SimpleNamespace(hidden_size=8)),
        "shared_inboxes": lambda group, tokens, width, device: inboxes,
        "Standalone": standalone,
        "measure": measure,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(rank_sums, name, value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name in ("init_process_group", "barrier", "destroy_process_group"):
        monkeypatch.setattr(rank_sums.dist, name, lambda *_, **given: None)
    monkeypatch.setattr(rank_sums.dist, "group", SimpleNamespace(WORLD=object()))
    rank_sums.work(1, Namespace(tp=2, layers=2, tokens=[1, 4], output=None), 0)
    assert measured == [*KINDS, *KINDS]


@pytest.mark.parametrize(("tokens", "found"), [([1], 1), ([1, 16], 16), ([17], 32), ([64, 1], 64), ([65], 128)])
def test_every_step_has_room(tokens: list[int], found: int) -> None:
    """Parts without room would be reduced, under the name of pushed ones."""
    assert rank_sums.room(tokens) == found


def test_other_logits_end_the_benchmark() -> None:
    """Two ranks have one order of sums, more have several; a logit that is no number is never right."""
    reduced = torch.randn(3, 50)
    rounded = reduced * (1 + 2.0**-9)
    for ranks in (2, 4):
        assert rank_sums.compare(reduced, reduced.clone(), ranks) == 0
        for wrong in (reduced * 0.75, torch.full_like(reduced, float("nan"))):
            with pytest.raises(AssertionError, match="3 requests: "):
                rank_sums.compare(reduced, wrong, ranks)
    assert rank_sums.compare(reduced, rounded, 4) == pytest.approx(2.0**-9, rel=1e-4)
    with pytest.raises(AssertionError, match="150 logits differ"):
        rank_sums.compare(reduced, rounded, 2)


def test_what_a_sum_adds() -> None:
    """Medians, of all sums of a step."""
    times = {"all-reduce": [130.0, 190.0, 140.0], "pushed": [110.0, 112.0, 90.0], "none": [100.0, 100.0, 101.0]}
    said = line(16, times, 0.0123, 4)
    assert said.startswith(" 16 requests: all-reduce 140.0 us (measurements differ by 60.0), 10.00 us a sum;")
    assert "pushed 110.0 us (measurements differ by 22.0), 2.50 us a sum; no sums 100.0 us;" in said
    assert said.endswith("; logits differ by 0.012")
