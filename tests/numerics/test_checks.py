"""A check that is run once for what looks the same is run again for whatever it may go by."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import REMEMBERED, forget, keeping_nothing, once, require_shape


@dataclass(frozen=True)
class Pair:
    first: Tensor
    rows: tuple[Tensor, int]


def pair(shape: tuple[int, ...] = (4, 8), dtype: torch.dtype = torch.float32, device: str = "cpu") -> Pair:
    return Pair(torch.empty(shape, dtype=dtype, device=device), (torch.empty(3), 7))


def shifted(offset: int) -> Tensor:
    """fp32 [32], ``offset`` bytes behind an address that is a multiple of 16."""
    memory = torch.empty(256, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + offset
    return memory[start : start + 128].view(torch.float32)


@pytest.fixture
def counted() -> tuple[list[object], object]:
    ran: list[object] = []

    @once
    def check(op: str, given: Pair | Tensor, bound: float | None = None) -> int:
        """A check."""
        ran.append(given)
        return len(ran)

    return ran, check


def test_it_runs_once_for_what_looks_the_same(counted) -> None:
    ran, check = counted
    assert [check("op", pair(), bound=2.0) for _ in range(3)] == [1, 1, 1] and len(ran) == 1
    assert check.__doc__ == "A check."


@pytest.mark.parametrize(
    "other",
    [
        ("op", pair((8, 4))),
        ("op", pair(dtype=torch.bfloat16)),
        ("op", pair(device="meta")),
        ("op", replace(pair(), first=torch.empty(8, 4).t())),
        ("op", replace(pair(), rows=(torch.empty(4), 7))),
        ("op", replace(pair(), rows=(torch.empty(3), 8))),
        ("op", pair().first),
        ("op", pair(), 2.0),
        ("another", pair()),
    ],
    ids=["shape", "dtype", "device", "strides", "nested", "number in it", "no pair", "argument", "name"],
)
def test_it_runs_again_for_what_differs_in(other, counted) -> None:
    ran, check = counted
    check("op", pair())
    check(*other)
    assert len(ran) == 2


def test_addresses_count_modulo_what_copies_ask_for(counted) -> None:
    ran, check = counted
    for offset in (0, 4, 16, 20):
        check("op", shifted(offset))
    assert len(ran) == 2


def test_what_is_refused_is_refused_each_time() -> None:
    check = once(lambda tensor: require_shape("x", tensor, (3,)))
    check(torch.empty(3))
    for _ in range(2):
        with pytest.raises(OperandValueError, match=r"x: expected shape \(3,\), found \(4,\)"):
            check(torch.empty(4))


def test_results_of_ever_other_sizes_are_not_kept_for_ever(counted) -> None:
    ran, check = counted
    first = torch.empty(0)
    for size in range(REMEMBERED + 1):
        check("op", first.new_empty(size))
    check("op", first)
    assert len(ran) == REMEMBERED + 2


@pytest.mark.parametrize(("first", "other"), [(1, True), (1, 1.0), (0.0, False)])
def test_equal_numbers_of_other_types_differ(first: object, other: object, counted) -> None:
    """A check may take one and refuse the other."""
    ran, check = counted
    check("op", first)
    check("op", other)
    assert len(ran) == 2


def test_an_argument_by_its_name_is_not_a_pair() -> None:
    check = once(lambda *arguments, **named: (arguments, named))
    assert check(op=1) == ((), {"op": 1})
    assert check(("op", 1)) == ((("op", 1),), {})


def test_nothing_is_kept_in_blocks_that_lie_in_each_other(counted) -> None:
    ran, check = counted
    check("op", 1)
    with keeping_nothing():
        with keeping_nothing():
            check("op", 1)
        for _ in range(2):
            check("op", 1)
    assert len(ran) == 4
    for _ in range(2):
        check("op", 1)
    assert len(ran) == 5


def test_results_are_kept_again_behind_a_block_that_fails(counted) -> None:
    ran, check = counted
    with pytest.raises(ValueError, match="inside"), keeping_nothing():
        raise ValueError("inside")
    for _ in range(2):
        check("op", 1)
    assert len(ran) == 1


def test_what_is_forgotten_while_it_is_computed_is_not_kept() -> None:
    """As by another thread: the result goes by what was before."""
    chip, changes = ["before"], [lambda: None]

    @once
    def check(op: str) -> str:
        found = chip[0]
        changes[0]()
        return found

    def change() -> None:
        chip[0] = "behind"
        forget()

    changes[0] = change
    assert check("op") == "before"
    changes[0] = lambda: None
    assert check("op") == "behind"
