"""Decoders of stored matrices: one for each storage, with the tensors of a matrix and their meaning.

A decoder knows nothing of files, names of layers or ranks. The inventory holds what is there against
:attr:`Decoder.parts`, the reader cuts a rank's range out of each part, and :meth:`Decoder.decode` makes a matrix of the
pieces. To add a storage, write a decoder here and name it in :class:`.storage.Storage`.

Headers are checked without torch, which takes seconds to import; so only what touches values imports it.

Source: specification §8.1, §8.2, §9.6; compressed-tensors' ``nvfp4-pack-quantized`` and ``float-quantized`` formats.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from nvfp4_sgl.checkpoint import values
from nvfp4_sgl.formats import blocks

if TYPE_CHECKING:
    from torch import Tensor

    from nvfp4_sgl.formats.mxfp4 import MxFp4Tensor
    from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
    from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor

Matrix: TypeAlias = "NvFp4Tensor | Tensor"
"""[..., N, K]: NVFP4, or a plain tensor, BF16 or F32."""

MatrixRange: TypeAlias = "tuple[str, slice | None, slice | None]"
"""Stem of a matrix, and the rows and columns of it."""


class Writer(enum.Enum):
    """Exporters whose words in ``quantization_config`` can mean a storage."""

    MODELOPT = "ModelOpt or DeepSeek"
    COMPRESSED_TENSORS = "compressed-tensors"


@dataclass(frozen=True)
class Part:
    """One stored tensor of a matrix [N, K].

    Attributes:
        suffixes: what follows the stem, ``weight`` for ``<stem>.weight``; alternatives, of which one is there.
        dtypes: safetensors' names, alternatives.
        unit: rows and columns of the matrix that a stored element stands for; ``None`` for a scalar of the matrix.
        rule: what its values may be.
        optional: may be absent. Such a part is never read.
    """

    suffixes: tuple[str, ...]
    dtypes: tuple[str, ...]
    unit: tuple[int, int] | None
    rule: values.Rule
    optional: bool = False

    def shapes(self, n: int, k: int) -> list[tuple[int, ...]]:
        """Shapes that are allowed for a matrix [n, k]; the first is the usual one."""
        if self.unit is None:
            return [(), (1,)]
        return [(-(-n // self.unit[0]), -(-k // self.unit[1]))]


class Pieces(Protocol):
    """The stored tensors of one matrix, cut to the range that is read; a part's name is its first suffix."""

    def piece(self, part: str) -> Tensor:
        """The range's share of a part."""
        ...

    def whole(self, part: str) -> Tensor:
        """The whole of a part."""
        ...


class Decoder(ABC):
    """A storage.

    Attributes:
        scheme: how ``quantization_config`` calls it; empty for matrices that are not quantised.
        writers: whose words those are.
        parts: what is stored for a matrix.
        block: rows and columns of the smallest piece that can be decoded alone.
        is_packed: whether :meth:`decode` gives NVFP4, which can be cut at every 16th column, or a plain tensor.
        has_mxfp8: whether :meth:`mxfp8` gives the same values in MXFP8.
    """

    scheme: ClassVar[str]
    writers: ClassVar[frozenset[Writer]]
    parts: ClassVar[tuple[Part, ...]]
    block: ClassVar[tuple[int, int]] = (1, 1)
    is_packed: ClassVar[bool] = False
    has_mxfp8: ClassVar[bool] = False

    @abstractmethod
    def recognises(self, stored: Mapping[str, str]) -> bool:
        """Whether a matrix with these tensors is meant to be of this storage.

        Args:
            stored: dtypes by suffix, of all suffixes that any storage has.
        """

    @abstractmethod
    def decode(self, pieces: Pieces) -> Matrix:
        """The matrix, or the part of it that ``pieces`` hold, which begins and ends with whole blocks."""

    def mxfp8(self, pieces: Pieces) -> MxFp8Tensor:
        """The matrix in MXFP8, every value as it is; for storages that have :attr:`has_mxfp8`."""
        raise NotImplementedError(f"{type(self).__name__}: no MXFP8 form")

    def values(self, pieces: Pieces) -> Tensor:
        """fp32 [n, k]: the values of the stored tensors, also where they have no exact form here."""
        matrix: Any = self.decode(pieces)
        return matrix.dequantize() if self.is_packed else matrix.float()

    def problem(self, pieces: Pieces) -> str | None:
        """Why the matrix has no exact form here; ``None`` if it has one. Looks at the whole matrix."""
        return None

    def part(self, suffix: str) -> Part | None:
        """The part that is stored under ``suffix``, if there is one."""
        return next((part for part in self.parts if suffix in part.suffixes), None)

    @property
    def column_multiple(self) -> int:
        """The number that K must be a multiple of."""
        return self.block[1] if self.is_packed else 1


class ModelOptNvFp4(Decoder):
    """ModelOpt's NVFP4: value = e2m1 · weight_scale · weight_scale_2. ``input_scale`` calibrates, and is not read."""

    scheme = "NVFP4"
    writers = frozenset({Writer.MODELOPT})
    parts = (
        Part(("weight",), ("U8",), (1, 2), values.anything),
        Part(("weight_scale",), ("F8_E4M3",), blocks.NVFP4, values.e4m3_scales),
        Part(("weight_scale_2",), ("F32",), None, values.global_scale),
        Part(("input_scale",), ("F32",), None, values.global_scale, optional=True),
    )
    block = blocks.NVFP4
    is_packed = True

    def recognises(self, stored: Mapping[str, str]) -> bool:
        return "weight_scale_2" in stored or "weight_scale" in stored or stored.get("weight") == "U8"

    def decode(self, pieces: Pieces) -> NvFp4Tensor:
        """The bytes as they are stored."""
        formats = values.arithmetic()
        global_scale = pieces.whole("weight_scale_2").reshape(())
        return formats.NvFp4Tensor(pieces.piece("weight"), pieces.piece("weight_scale"), global_scale)


class CompressedNvFp4(Decoder):
    """compressed-tensors' NVFP4: value = e2m1 · weight_scale / weight_global_scale.

    The global scale is the inverse of ModelOpt's; its reciprocal is taken once, in fp32.
    """

    scheme = "NVFP4"
    writers = frozenset({Writer.COMPRESSED_TENSORS})
    parts = (
        Part(("weight_packed",), ("U8",), (1, 2), values.anything),
        Part(("weight_scale",), ("F8_E4M3",), blocks.NVFP4, values.e4m3_scales),
        Part(("weight_global_scale",), ("F32",), None, values.inverse_global_scale),
        Part(("input_global_scale",), ("F32",), None, values.inverse_global_scale, optional=True),
    )
    block = blocks.NVFP4
    is_packed = True

    def recognises(self, stored: Mapping[str, str]) -> bool:
        return "weight_packed" in stored or "weight_global_scale" in stored

    def decode(self, pieces: Pieces) -> NvFp4Tensor:
        """Codes and block scales as they are stored."""
        formats = values.arithmetic()
        global_scale = pieces.whole("weight_global_scale").reshape(()).reciprocal()
        return formats.NvFp4Tensor(pieces.piece("weight_packed"), pieces.piece("weight_scale"), global_scale)


class MxFp4AsNvFp4(Decoder):
    """MXFP4, read as NVFP4 with the same codes: exact wherever a matrix's exponents spread over at most 17.

    A block of 32 becomes two of 16 whose scales are equal powers of two; the global scale, also a power of two, is one
    for the whole matrix, so that every rank has the same.
    """

    scheme = "MXFP4"
    writers = frozenset({Writer.MODELOPT})
    parts = (
        Part(("weight",), ("I8", "U8"), (1, 2), values.anything),
        Part(("scale", "weight_scale_inv"), ("F8_E8M0",), blocks.MXFP4, values.mxfp4_scales),
    )
    block = blocks.MXFP4
    is_packed = True

    def recognises(self, stored: Mapping[str, str]) -> bool:
        has_scale = "scale" in stored or "weight_scale_inv" in stored
        is_nvfp4 = "weight_scale" in stored or "weight_scale_2" in stored
        match stored.get("weight"):
            case "I8":
                return has_scale or not is_nvfp4
            case "U8":
                return has_scale and "weight_scale" not in stored
        return False

    def decode(self, pieces: Pieces) -> NvFp4Tensor:
        """OperandValueError if the part has no exact NVFP4 form; ask :meth:`problem` first."""
        formats = values.arithmetic()
        return formats.mxfp4.to_nvfp4(self._stored(pieces), self.exponents(pieces)[1])

    def values(self, pieces: Pieces) -> Tensor:
        return self._stored(pieces).dequantize()

    def problem(self, pieces: Pieces) -> str | None:
        formats = values.arithmetic()
        low, high = self.exponents(pieces)
        if low.is_meta:
            return None  # a model without values, of which the kernels alone are asked
        return formats.mxfp4.why_not_exact(int(low), int(high))

    @staticmethod
    def _stored(pieces: Pieces) -> MxFp4Tensor:
        formats = values.arithmetic()
        return formats.MxFp4Tensor(
            pieces.piece("weight").view(formats.torch.uint8), formats.ue8m0.as_bytes(pieces.piece("scale"))
        )

    @staticmethod
    def exponents(pieces: Pieces) -> tuple[Tensor, Tensor]:
        """Smallest and largest block exponent, int32 scalars. Codes are read only if blocks of zeros may matter."""
        formats = values.arithmetic()
        scale = formats.ue8m0.as_bytes(pieces.whole("scale"))
        low, high = (extreme.int() - formats.ue8m0.BIAS for extreme in scale.aminmax())
        if low.is_meta or formats.mxfp4.why_not_exact(int(low), int(high)) is None:
            return low, high
        codes = pieces.whole("weight").view(formats.torch.uint8)
        return formats.mxfp4.exponents(formats.MxFp4Tensor(codes, scale))


class Fp8PowerScales(Decoder):
    """FP8 in blocks of 128 × 128 with UE8M0 scales: value = e4m3 · 2^(scale − 127)."""

    scheme = "FP8"
    writers = frozenset(Writer)
    parts = (
        Part(("weight",), ("F8_E4M3",), (1, 1), values.e4m3_values),
        Part(("scale", "weight_scale_inv"), ("F8_E8M0",), blocks.FP8, values.fp8_power_scales),
    )
    block = blocks.FP8
    has_mxfp8 = True

    def recognises(self, stored: Mapping[str, str]) -> bool:
        return "scale" in stored or "weight_scale_inv" in stored or stored.get("weight") == "F8_E4M3"

    def decode(self, pieces: Pieces) -> Tensor:
        """BF16 where that is exact, as it is short of subnormal values; else F32."""
        formats = values.arithmetic()
        exact = formats.Fp8BlockTensor(pieces.piece("weight"), pieces.piece("scale")).dequantize()
        rounded = exact.bfloat16()
        return exact if formats.holds_any(rounded.float() != exact) else rounded

    def mxfp8(self, pieces: Pieces) -> MxFp8Tensor:
        """The codes as they are stored; each scale for every 32 of 128 columns, in each of its rows."""
        formats = values.arithmetic()
        return formats.mxfp8.from_blocks(formats.Fp8BlockTensor(pieces.piece("weight"), pieces.piece("scale")))


class Fp8FloatScales(Decoder):
    """FP8 in blocks of 128 × 128 with F32 or BF16 scales: value = e4m3 · scale, rounded once to fp32.

    The ``-Base`` releases (``scale``, F32), exports with transformers' names (``weight_scale_inv``, which multiplies in
    spite of its name) and compressed-tensors' ``FP8_BLOCK`` (``weight_scale``).
    """

    scheme = "FP8"
    writers = frozenset(Writer)
    parts = (
        Part(("weight",), ("F8_E4M3",), (1, 1), values.e4m3_values),
        Part(
            ("scale", "weight_scale_inv", "weight_scale"),
            ("F32", "BF16"),
            blocks.FP8,
            values.fp32_scales,
        ),
    )
    block = blocks.FP8

    def recognises(self, stored: Mapping[str, str]) -> bool:
        scales = [stored[suffix] for suffix in self.parts[1].suffixes if suffix in stored]
        return stored.get("weight") == "F8_E4M3" and any(dtype in ("F32", "BF16") for dtype in scales)

    def decode(self, pieces: Pieces) -> Tensor:
        """F32: the scale has more bits than bf16 leaves room for."""
        formats = values.arithmetic()
        return formats.fp8_block.dequantize_blocks(pieces.piece("weight"), pieces.piece("scale").float())


class Plain(Decoder):
    """A matrix that is not quantised."""

    scheme = ""
    writers = frozenset(Writer)
    parts = (Part(("weight",), ("BF16", "F32"), (1, 1), values.plain),)

    def recognises(self, stored: Mapping[str, str]) -> bool:
        return True

    def decode(self, pieces: Pieces) -> Tensor:
        """The tensor as it is stored."""
        return pieces.piece("weight")
