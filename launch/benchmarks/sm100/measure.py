"""The part of launch/bench_sm100 for a real B200: operands, numerics against fp64, times, other libraries."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.sm100.cases import Case
from nvfp4_sgl.cutedsl_kernels.mxfp8 import operations as mxfp8_operations
from nvfp4_sgl.cutedsl_kernels.mxfp8.operand import MxFp8Weights
from nvfp4_sgl.cutedsl_kernels.plan import rows_of
from nvfp4_sgl.cutedsl_kernels.sm100.shape import BlockScaledKind
from nvfp4_sgl.cutedsl_kernels.w4a4 import operations
from nvfp4_sgl.cutedsl_kernels.w4a4.operand import Weights
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.formats.rows import ExpertRows, MxFp8Rows, Rows
from nvfp4_sgl.formats.scale_layout import scale_offset, swizzle_128x4
from tests.support.departure import Departure

E4M3 = torch.float8_e4m3fn
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BLOCK = 16
COLD_BYTES = 400 * 2**20
"""Operands that a timed run goes through before it comes back to the first: three times a B200's L2."""
MOST_COPIES = 64
NAN_SCALE = 0x7F
"""An E4M3 NaN, which poisons the block that it scales."""
TINY = 1e-30
"""Keeps an error of zero where nothing is allowed from being 0 / 0."""
SAMPLED = 64
"""Rows, and blocks of 16 features, that are compared."""


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """fp64 [..., K] of codes and plain block scales: packed E2M1 under E4M3, or E4M3 under UE8M0 exponents in uint8."""
    if codes.dtype == E4M3:
        return codes.double() * torch.exp2(scales.double() - 127).repeat_interleave(2 * BLOCK, dim=-1)
    table = torch.tensor([*E2M1, *(-one for one in E2M1)], dtype=torch.float64, device=codes.device)
    pairs = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), dim=-1).flatten(-2)
    return pairs * scales.double().repeat_interleave(BLOCK, dim=-1)


@dataclass(frozen=True)
class Sample:
    """Some outputs of one row, fp64 [features], beside what they should be and how far off they may be."""

    row: int
    group: int
    features: Tensor
    found: Tensor
    expected: Tensor
    allowed: Tensor

    @property
    def errors(self) -> Tensor:
        """Over what is allowed; infinite for a NaN."""
        return ((self.found - self.expected).abs() / self.allowed).nan_to_num(nan=torch.inf)

    def departure(self, rows: int) -> Departure:
        """The first wrong output, and that ``rows`` rows have any."""
        wrong = self.errors > 1.0
        at = int(torch.nonzero(wrong)[0])
        return Departure(
            f"output of row {self.row}, group {self.group}, feature {int(self.features[at])}",
            expected=f"{float(self.expected[at]):.8g} +- {float(self.allowed[at]):.2g}",
            found=f"{float(self.found[at]):.8g}",
            detail=f"{int(wrong.sum())} of {wrong.numel()} sampled outputs of that row, and {rows} sampled rows, are"
            f" wrong; found over expected there: {_ratios(self.found[wrong] / self.expected[wrong])}",
        )


def _ratios(values: Tensor) -> str:
    """Their range: a wrong factor shows as a single number."""
    return f"{float(values.min()):.4g} to {float(values.max()):.4g}"


@dataclass(frozen=True)
class Drawn:
    """Random operands: codes and plain block scales."""

    generator: torch.Generator
    kind: BlockScaledKind

    def operand(self, k: int, *shape: int) -> tuple[Tensor, Tensor]:
        """Codes of ``shape`` by K elements, any but NaN, and their block scales, within a factor of 8."""
        if self.kind == "nvfp4":
            scales = self._integers(0x28, 0x40, *shape, k // BLOCK)
            return self._integers(0, 256, *shape, k // 2), scales.view(E4M3)
        # Magnitudes up to 448: the code above is NaN.
        signs = self._integers(0, 2, *shape, k) << 7
        codes = (self._integers(0, 0x7F, *shape, k) | signs).view(E4M3)
        return codes, self._integers(120, 124, *shape, k // (2 * BLOCK))

    def factors(self, *shape: int) -> Tensor:
        """Scales of rows and matrices; MXFP8 has none."""
        device = self.generator.device
        if self.kind == "mxfp8":
            return torch.ones(shape, device=device)
        return torch.rand(shape, device=device, generator=self.generator) / 64 + 1 / 64

    def _integers(self, low: int, high: int, *shape: int) -> Tensor:
        device = self.generator.device
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=self.generator)


@dataclass
class Workload:
    """Random operands of a case, its launch, and what the launch should give."""

    case: Case
    launch: Callable[[], object]
    out: Tensor | Rows
    codes: Tensor
    scales: Tensor
    """Plain block scales of the tokens."""
    row_scale: Tensor
    weights: Tensor
    weight_scales: Tensor
    alpha: Tensor
    group_of_row: Tensor
    """The expert of each row, -1 for padding; all 0 unless routed."""

    @classmethod
    def make(cls, case: Case, device: torch.device, seed: int = 1) -> Workload:
        one, generator = case.product, torch.Generator(device).manual_seed(seed)
        drawn = Drawn(generator, case.kind)
        tile, halves = case.token_tile, (2,) if one.gated else ()
        counts = _counts(case, generator)
        padded = (counts + tile - 1) // tile * tile if case.routed else counts
        offsets = padded.cumsum(0) - padded
        rows = rows_of(case.pairs, one.groups, tile) if case.routed else case.tokens
        groups = (one.groups,) if one.groups > 1 and not case.routed else ()
        codes, scales = drawn.operand(one.k, rows, *groups)
        row_scale = drawn.factors(rows, *groups)
        size = (one.groups, *halves) if one.groups > 1 or one.gated or case.routed else ()
        weights, weight_scales = drawn.operand(one.k, *size, one.features)
        alpha = drawn.factors(*(size if case.routed or one.gated else (*size, one.features)))
        arranged = swizzle_128x4(scales.flatten(1), tile)
        index = torch.arange(rows, device=device)
        group_of_row = torch.zeros_like(index)
        if case.kind == "mxfp8":
            whole = MxFp8Tensor(weights[0] if one.gated else weights, weight_scales[0] if one.gated else weight_scales)
            of_case = MxFp8Weights.gated(whole) if one.gated else MxFp8Weights.of(whole)
            run, of_run = _launch_mxfp8(case, MxFp8Rows(codes, arranged.flatten(), tile), of_case)
            return cls(case, run, of_run, codes, scales, row_scale, weights, weight_scales, alpha, group_of_row)
        if case.routed:
            ends = offsets + padded
            group_of_row = torch.searchsorted(ends, index, right=True).clamp(max=one.groups - 1)
            group_of_row[index - offsets[group_of_row] >= counts[group_of_row]] = -1
            fields = codes, arranged, row_scale, tile, offsets.int(), counts.int()
            tokens: Rows = ExpertRows(*fields)
        else:
            tokens = Rows(codes, arranged, row_scale, tile)
        make = Weights.dense
        if case.routed or one.gated:
            make = Weights.gated_experts if one.gated else Weights.experts
        elif groups:
            make = Weights.grouped
        launch, out = _launch(case, tokens, make(weights, weight_scales, alpha))
        return cls(case, launch, out, codes, scales, row_scale, weights, weight_scales, alpha, group_of_row)

    def largest_error(self) -> float:
        """Run, and compare a sample with fp64: the largest error over what rounding may cost; at most 1 is right.

        Allowed: half a bf16 ulp and fp32 sums; for NVFP4 outputs half of the widest step between a block's codes.
        """
        self.launch()
        return max(float(sample.errors.max()) for sample in self._samples())

    def check(self) -> None:
        """The same with outputs poisoned before.

        Raises:
            Departure: an error is larger than rounding allows; names the first such output.
        """
        if isinstance(self.out, Tensor):
            self.out.fill_(torch.nan)
        else:
            self.out.codes.fill_(0xFF)
            self.out.block_scales.view(torch.uint8).fill_(NAN_SCALE)
        self.launch()
        wrong = [sample for sample in self._samples() if float(sample.errors.max()) > 1.0]
        if wrong:
            raise wrong[0].departure(len(wrong))

    def _samples(self) -> Iterator[Sample]:
        one = self.case.product
        generator = torch.Generator().manual_seed(2)
        filled = torch.nonzero(self.group_of_row >= 0).flatten().cpu()
        rows = filled[torch.randperm(len(filled), generator=generator)[:SAMPLED]].tolist()
        blocks = torch.randperm(one.features // BLOCK, generator=generator)[: SAMPLED // 4]
        features = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten().to(self.codes.device)
        for row in rows:
            for group in range(one.groups) if self.codes.dim() == 3 else [int(self.group_of_row[row])]:
                expected, slack = self._expected(row, group, features)
                rounding = self._rounding(expected)
                yield Sample(row, group, features, self._found(row, group, features), expected, slack + rounding + TINY)

    def _expected(self, row: int, group: int, features: Tensor) -> tuple[Tensor, Tensor]:
        """fp64 outputs of a row, and what fp32 sums may change."""
        inner = (row, group) if self.codes.dim() == 3 else (row,)
        token = values(self.codes[inner], self.scales[inner])
        stacked = self.weights.dim() > 2
        weights, scales = (tensor[group] if stacked else tensor for tensor in (self.weights, self.weight_scales))
        weight = values(weights[..., features, :], scales[..., features, :])
        alpha = (self.alpha[group] if stacked else self.alpha).double()
        alpha = alpha[..., features] if alpha.dim() and alpha.shape[-1] == self.case.product.features else alpha
        factor = self.row_scale[inner].double() * (alpha[..., None] if self.case.product.gated else alpha)
        result, slack = weight @ token * factor, (weight.abs() @ token.abs()) * factor * 2.0**-20
        if self.case.product.gated:
            limit = self.case.limit
            gate, up = result[0].clamp(max=limit), result[1].clamp(-limit, limit)
            result = torch.nn.functional.silu(gate) * up
            slack = 1.1 * slack[0] * up.abs() + slack[1] * gate.abs() + result.abs() * 2.0**-20
        return result, slack

    def _rounding(self, expected: Tensor) -> Tensor:
        """The largest error of rounding to the output; of NVFP4 half of the step between 4 and 6.

        A block scale is the largest magnitude over 6, rounded to E4M3.
        """
        if isinstance(self.out, Tensor):
            return expected.abs() * torch.finfo(self.out.dtype).eps / 2
        largest = expected.view(-1, BLOCK).abs().amax(dim=1).repeat_interleave(BLOCK)
        return largest / 6 * (1 + 2.0**-4) + float(self.out.scale) * 2.0**-7

    def _found(self, row: int, group: int, features: Tensor) -> Tensor:
        """fp64 outputs of a row."""
        if isinstance(self.out, Tensor):
            return self.out[(row, group) if self.out.dim() == 3 else (row,)][features].double()
        size, tile = self.case.product.features, self.out.token_tile
        bytes_of = [scale_offset(row, block, size, tile) for block in range(size // BLOCK)]
        scales = self.out.block_scales.flatten()[torch.tensor(bytes_of, device=features.device)]
        return values(self.out.codes[row], scales)[features] * float(self.out.scale)


def _counts(case: Case, generator: torch.Generator) -> Tensor:
    """Rows of each expert where every token takes different ones at random, and the last if that is shared."""
    if not case.routed:
        return torch.tensor([case.tokens], device=generator.device)
    drawn = torch.rand(case.tokens, case.product.groups, generator=generator, device=generator.device)
    if case.product.shared:
        drawn[:, -1] = 1
    chosen = drawn.topk(case.product.experts_per_token, dim=1).indices
    return torch.bincount(chosen.flatten(), minlength=case.product.groups)


def _launch(case: Case, tokens: Rows, weights: Weights) -> tuple[Callable[[], object], Tensor | Rows]:
    one = case.product
    if one.gated:
        hidden = operations.hidden_rows(tokens, one.features, case.limit)
        ahead, gate_up = case.routed, operations.expert_gate_up_quantized
        return lambda: gate_up(tokens, weights, case.limit, out=hidden, counts_ahead=ahead), hidden
    out = tokens.codes.new_empty((*tokens.codes.shape[:-1], one.features), dtype=DTYPES[case.product.output])
    if case.routed:
        return lambda: operations.expert_down(tokens, weights, out=out, counts_ahead=True), out
    call = operations.grouped_product if tokens.codes.dim() == 3 else operations.product
    return lambda: call(tokens, weights, out=out), out


def _launch_mxfp8(case: Case, rows: MxFp8Rows, weights: MxFp8Weights) -> tuple[Callable[[], object], Tensor]:
    one = case.product
    out = torch.empty(*rows.codes.shape[:-1], one.features, dtype=DTYPES[one.output], device=rows.codes.device)
    if one.gated:
        return lambda: mxfp8_operations.gate_up(rows, weights, case.limit, out=out), out
    return lambda: mxfp8_operations.product(rows, weights, out=out), out


class CudaTimer:
    """Seconds of a launch, by CUDA graphs and events."""

    def __init__(self, repeats: int = 20) -> None:
        self.repeats = repeats

    def seconds(self, launches: list[Callable[[], object]]) -> float:
        """Seconds of one of several like launches that run after one another: the median over replays of all."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for launch in launches:
                launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        times = []
        for _ in range(self.repeats + 3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / len(launches))
        return statistics.median(times[3:])


def others(load: Workload) -> dict[str, Callable[[], object]]:
    """The same dense GEMM by other libraries, where they have it."""
    one = load.case.product
    if load.codes.dim() != 2 or load.weights.dim() != 2 or load.case.kind != "nvfp4":
        return {}
    tokens, weights = swizzle_128x4(load.scales), swizzle_128x4(load.weight_scales)
    packed = torch.float4_e2m1fn_x2
    found: dict[str, Callable[[], object]] = {
        "cublas": lambda: torch._scaled_mm(
            load.codes.view(packed), load.weights.view(packed).t(), tokens.flatten(), weights.flatten(),
            out_dtype=torch.bfloat16,
        )
    }  # fmt: skip
    try:
        from flashinfer import mm_fp4
    except ImportError:
        return found
    of_tokens, of_weights = (scales.view(torch.uint8).view(-1, one.k // BLOCK) for scales in (tokens, weights))
    alpha = torch.ones(1, device=load.codes.device)
    found["flashinfer"] = lambda: mm_fp4(load.codes, load.weights.t(), of_tokens, of_weights.t(), alpha)
    return found


@dataclass(frozen=True)
class Measured:
    """Results of one case: seconds, the largest error over what is allowed, and seconds of other libraries."""

    seconds: float
    error: float
    others: dict[str, float]


def measure(case: Case, device: torch.device, timer: CudaTimer) -> Measured:
    """Check and time a case on ``device``, with operands that are not in its caches."""
    copies = max(1, min(MOST_COPIES, int(COLD_BYTES / case.problem.least_bytes)))
    loads = [Workload.make(case, device, seed) for seed in range(copies)]
    error = loads[0].largest_error()
    seconds = timer.seconds([load.launch for load in loads])
    rivals: dict[str, list[Callable[[], object]]] = {}
    for load in loads:
        for name, launch in others(load).items():
            rivals.setdefault(name, []).append(launch)
    timed = {}
    for name, launches in rivals.items():
        try:
            timed[name] = timer.seconds(launches)
        except (RuntimeError, NotImplementedError, ValueError) as failure:
            print(f"{name} refused {case.product.name}, {case.tokens} tokens: {str(failure).splitlines()[0]}")
    return Measured(seconds, error, timed)
