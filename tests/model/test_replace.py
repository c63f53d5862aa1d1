"""Weights replaced in a built decoder: bit for bit those of a new one, at the old addresses, on every target."""

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.model.replace import pairs, replace_draft, replace_weights, workspace_bytes
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.choose import choose
from nvfp4_sgl.targets.target import modes, words
from nvfp4_sgl.weights.parallel import TensorParallel
from tests.support import held
from tests.support.damage import change_tensor, copy_checkpoint, file_of, set_byte

SHAPES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 6}
"""A layer of each kind."""
FULL, SPLIT = "nvfp4-full", 2
RUNS = [(target, mode) for target in words() for mode in modes(target)]
CASES = [
    *((*run, FULL, rank, SPLIT) for run in RUNS for rank in range(SPLIT)),
    *((*run, "deepseek", 0, 1) for run in RUNS),
]
"""Target, mode, format, rank and ranks; between them matrices in NVFP4, MXFP4, FP8 and BF16."""

Pair = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two checkpoints of a format that differ in their values."""
    folder = tmp_path_factory.mktemp("pairs")

    def write(format: str) -> tuple[Path, Path]:
        paths = folder / f"{format}-3", folder / f"{format}-4"
        for seed, path in enumerate(paths, 3):
            if not path.exists():
                write_tiny(path, format, seed=seed, **SHAPES)
        return paths

    return write


def context_of(path: Path, target: str, rank: int = 0, size: int = 1, mode: ActivationMode | None = None) -> Context:
    verified, choice = verify(path), choose(target, mode)
    dtype = torch.float32 if target == "cpu" else torch.bfloat16
    parallel = TensorParallel(rank, size)
    return Context(
        verified.reader(), verified.config, choice.boundaries, dtype=dtype, mode=choice.mode, parallel=parallel
    )


def tensors(decoder: torch.nn.Module) -> list[torch.Tensor]:
    """Every tensor that can be reached from ``decoder``, found by the garbage collector's view of objects."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    stack: list[Any] = [decoder]
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType | Context):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        stack += gc.get_referents(value)
    return found


def values(decoder: Decoder) -> Counter[str]:
    """Shape, dtype and digest of the bits of all tensors."""
    found: Counter[str] = Counter()
    for tensor in tensors(decoder):
        bits = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        found[f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(bits.tobytes()).hexdigest()[:16]}"] += 1
    return found


def places(decoder: Decoder) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors(decoder)}


@pytest.mark.parametrize(
    ("target", "mode", "format", "rank", "size"), CASES, ids=lambda value: str(getattr(value, "value", value))
)
def test_replaced_is_built_anew(
    target: str, mode: ActivationMode, format: str, rank: int, size: int, pair: Pair
) -> None:
    old, new = pair(format)
    decoder, expected = (Decoder(context_of(path, target, rank, size, mode)) for path in (old, new))
    before, at, wanted = values(decoder), places(decoder), values(expected)
    assert before != wanted and len(at) > 50
    replace_weights(decoder, context_of(new, target, rank, size, mode))
    now = values(decoder)
    assert not now - wanted and not wanted - now
    assert places(decoder) == at


def test_answers_are_those_of_the_new_weights(pair: Pair) -> None:
    old, new = pair(FULL)
    ids = list(range(30, 170))
    model, expected = Standalone(old, capacity=256, requests=1), Standalone(new, capacity=256, requests=1)
    first = model.extend({0: ids})[0]
    replace_weights(model.decoder, replace(model.decoder.context, source=verify(new).reader()))
    model.reset()
    model.table, model.head = expected.table, expected.head
    answer = expected.extend({0: ids})[0]
    assert torch.equal(model.extend({0: ids})[0], answer) and not torch.equal(first, answer)


def test_error_names_tensor_and_file(pair: Pair, tmp_path: Path) -> None:
    """A value that is damaged after all checks: the layers before are replaced, this one is not."""
    old, new = pair(FULL)
    path, name = copy_checkpoint(new, tmp_path / "damaged"), "layers.1.attn.wkv.weight_scale"
    change_tensor(path, name, set_byte(5, 0x7F))
    decoder = Decoder(context_of(old, "cpu"))

    def queries() -> list[torch.Tensor]:
        blocks: list[Any] = list(decoder.layers)
        return [block.attn.project_q._weights[0].values.clone() for block in blocks]

    before = queries()
    with pytest.raises(CheckpointError, match=name) as error:
        replace_weights(decoder, context_of(path, "cpu"))
    assert file_of(path, name).name in str(error.value)
    assert [torch.equal(*both) for both in zip(before, queries(), strict=True)] == [False, True, True]


def test_a_draft_is_replaced(pair: Pair) -> None:
    """Every tensor, where it is."""
    old, new = pair(FULL)
    draft, expected = (MtpDraft(context_of(path, "cpu")) for path in (old, new))
    before = [tensor.data_ptr() for tensor in held.tensors(draft)]
    replace_draft(draft, context_of(new, "cpu"))
    both = list(zip(held.tensors(draft), held.tensors(expected), strict=True))
    assert len(both) > 20 and all(torch.equal(*each) for each in both)
    assert [tensor.data_ptr() for tensor in held.tensors(draft)] == before


def test_what_is_built_otherwise_is_refused() -> None:
    def module(value: object) -> torch.nn.Module:
        result = torch.nn.Module()
        result.__dict__["value"] = value
        return result

    one, other = torch.zeros(2, 3), torch.zeros(3, 2)
    for old, new in (
        (one, other),
        (one, other.T),
        (one, one.half()),
        ([one], [one, one]),
        (3, 4),
        ({}, {"a": one}),
        (one, None),
    ):
        with pytest.raises(CheckpointError, match=r"layer\.value"):
            list(pairs("layer", module(old), module(new)))
    assert len(list(pairs("layer", module([one, (one,)]), module([one, (one,)])))) == 1


def test_room_for_a_layer(pair: Pair) -> None:
    decoder = Decoder(context_of(pair(FULL)[0], "cpu"))
    largest = max(sum(t.nbytes for t in tensors(block)) for block in decoder.layers)
    assert workspace_bytes(decoder) >= largest
