"""Every case of ``launch/bench_kernels`` at a small size is built and runs; where torch is a peer, it agrees."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from nvfp4_sgl.triton_kernels.common import chip
from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from benchmarks import families
from benchmarks.families import Peer

TOKENS = 1, 9
SIZES: dict[str, dict[str, Any]] = {
    "attention": {
        "HEADS_AND_TOPK": {"small": (16, 64)},
        "LAYERS": {"swa": (0, 1), "csa": (None, 64), "hca": (16, 2)},
        "QUERIES": TOKENS,
        "PROMPT": 9,
        "LEAST_ENTRIES": 256,
        "MOST_ENTRIES": 512,
    },
    "attention_inputs": {"CONTEXT": 4096, "REQUESTS": (1, 3), "PREFILL": 64, "SMALLER": (20,)},
    "hyper_connection": {"WIDTHS": {"small": 512}, "TOKENS": TOKENS},
    "indexer": {"CONTEXTS": {"1k": 1024}, "DECODING": (1, 3), "PROMPT": 20, "TOPK": {"small": 64}},
    "logits": {"VOCABULARY": 5000, "ROWS": TOKENS},
    "metadata": {"CONTEXTS": {"1k": 1024}, "DECODING": (1, 3), "PROMPT": 200, "SLOTS": 1 << 14},
    "quantize": {"TOKENS": TOKENS},
    "rope": {"TOKENS": TOKENS, "CONTEXT": 1024},
    "rounds": {"REQUESTS": TOKENS, "STREAMS": {"small": 64}},
    "routing": {"MODELS": {"small": (256, 32)}, "TOKENS": TOKENS, "LOGITS_TOKENS": TOKENS},
    "streams": {"WIDTHS": {"small": 512}, "TOKENS": TOKENS},
    "swiglu": {"TOKENS": TOKENS, "WIDTHS": {"small": (256, 128)}},
}
"""By family, its module's sizes, replaced."""
H200_PROCESSORS = 132


class _OnCpu(TorchFunctionMode):
    """Tensors for the GPU are made on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named: dict[str, Any] = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **(named | {"device": "cpu"} if named.get("device") == "cuda" else named))


@contextmanager
def _on(device: str) -> Iterator[None]:
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(_OnCpu())
            stack.enter_context(chip.assume(H200_PROCESSORS))
        yield


@pytest.mark.parametrize("family", sorted(module.name for module in pkgutil.iter_modules(families.__path__)))
def test_cases_run_and_agree_with_torch(family: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = importlib.import_module(f"benchmarks.families.{family}")
    for name, size in SIZES[family].items():
        monkeypatch.setattr(cases, name, size)
    for name, module in list(sys.modules.items()):
        if name.startswith("benchmarks.") and hasattr(module, "installed"):
            monkeypatch.setattr(module, "installed", lambda *packages: False)
    names, compared = [], 0
    with _on(device):
        for case in cases.cases():
            case.run()
            names.append(case.name)
            assert case.tokens > 0 and case.bytes > 0, case.name
            for name, peer in case.peers.items():
                (peer.run if isinstance(peer, Peer) else peer)()
                if isinstance(peer, Peer) and peer.error:
                    assert peer.error() <= peer.limit, (case.name, name)
                    compared += 1
    assert names and len(set(names)) == len(names)
    print(f"{len(names)} cases, {compared} comparisons")
