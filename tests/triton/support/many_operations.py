"""A kernel of many kinds of operations, and what it gives for seeded inputs; as a program, by the plain interpreter.

TRITON_INTERPRET=1 python -m tests.triton.support.many_operations OUT
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, RESULTS = 8, 16, 20


@triton.jit
def _scaled(x, FACTOR: tl.constexpr):
    return x * FACTOR


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _many(x, y, whole, half, out, counter, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    at = row * COLUMNS + columns
    a = tl.load(x + at)
    b = tl.load(y + at, mask=columns < 11, other=-0.5)
    n = tl.load(whole + at)
    h = tl.load(half + at)
    to = out + at
    step = ROWS * COLUMNS
    # Each pair takes operands of the same types, but once the same one twice.
    tl.store(to, a + a)
    tl.store(to + step, a + b)
    tl.store(to + 2 * step, a * 0.0)
    tl.store(to + 3 * step, a * -0.0)
    tl.store(to + 4 * step, _scaled(a, 3) - _scaled(a, 3.0))
    total = a * 0
    for i in range(5):
        total += b * i
    tl.store(to + 5 * step, total)
    tl.store(to + 6 * step, tl.where(n % 3 == 0, a / b, b / a))
    tl.store(to + 7 * step, ((n << 3) ^ (n >> 1) | (n // 7)).to(tl.float32))
    tl.store(to + 8 * step, (n > 0) & (a < b))
    tl.store(to + 9 * step, h.to(tl.float32) + (a + h))
    tl.store(to + 10 * step, (a * b).to(tl.bfloat16).to(tl.float32))
    tl.store(to + 11 * step, tl.sum(a[:, None] * b[None, :], axis=1))
    tl.store(to + 12 * step, tl.sum(a[None, :] * b[:, None], axis=1))
    tl.store(to + 13 * step, tl.exp(-tl.abs(a)) + tl.sqrt(tl.abs(b)) + tl.maximum(a, b))
    first, second = tl.split(tl.reshape(a, (COLUMNS // 2, 2)))
    tl.store(to + 14 * step, tl.reshape(tl.join(second, first), (COLUMNS,)))
    tl.store(to + 15 * step, tl.associative_scan(b, 0, _larger))
    tl.store(to + 16 * step, tl.sum(tl.dot(tl.trans(a[None, :]), b[None, :]), axis=1))
    tl.store(to + 17 * step, a.to(tl.int32, bitcast=True).to(tl.uint32).to(tl.float32))
    tl.store(to + 18 * step, tl.full((COLUMNS,), 1, tl.float32) + tl.full((COLUMNS,), 1.0, tl.float32))
    tl.store(to + 19 * step, n * 8388608 + n * 8388608.0)  # int32 overflows
    tl.atomic_add(counter + columns % 4, n, mask=n > 0)


def results() -> torch.Tensor:
    """Bytes of all that the kernel writes, for random values, infinity and NaN."""
    draw = torch.Generator().manual_seed(5)
    x, y = (torch.randn(ROWS, COLUMNS, generator=draw) for _ in range(2))
    x[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    whole = torch.randint(-1000, 1000, (ROWS, COLUMNS), generator=draw, dtype=torch.int32)
    out, counter = torch.full((RESULTS, ROWS, COLUMNS), torch.nan), torch.zeros(4, dtype=torch.int32)
    _many[(ROWS,)](x, y, whole, y.bfloat16(), out, counter, COLUMNS=COLUMNS, ROWS=ROWS)
    return torch.cat([out.view(torch.uint8).flatten(), counter.view(torch.uint8)])


if __name__ == "__main__":
    torch.save(results(), sys.argv[1])
