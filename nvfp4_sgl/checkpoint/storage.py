"""The storages that are read, in the order in which they are recognised."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from nvfp4_sgl.checkpoint import decoders
from nvfp4_sgl.checkpoint.decoders import Decoder


class Storage(enum.Enum):
    """Format of one matrix: ``value`` is its name for people, ``decoder`` what it looks like and means.

    A matrix's own tensors decide which it is (:meth:`of`), never a flag for the whole checkpoint.
    """

    decoder: Decoder

    NVFP4_COMPRESSED = "NVFP4, compressed-tensors", decoders.CompressedNvFp4()
    FP8_FLOAT_SCALES = "FP8, float scales", decoders.Fp8FloatScales()
    MXFP4 = "MXFP4", decoders.MxFp4AsNvFp4()
    NVFP4 = "NVFP4", decoders.ModelOptNvFp4()
    FP8 = "FP8", decoders.Fp8PowerScales()
    PLAIN = "plain", decoders.Plain()

    def __new__(cls, value: str, decoder: Decoder) -> Storage:
        member = object.__new__(cls)
        member._value_, member.decoder = value, decoder
        return member

    @property
    def is_nvfp4(self) -> bool:
        """Whether a matrix arrives as NVFP4, whatever it is stored as."""
        return self.decoder.is_packed

    @property
    def is_mxfp8(self) -> bool:
        """Whether a matrix can be read as MXFP8 with every value as it is."""
        return self.decoder.has_mxfp8

    @property
    def is_converted(self) -> bool:
        """Whether reading changes what holds the values, which may be impossible for some matrix."""
        return type(self.decoder).problem is not Decoder.problem

    @classmethod
    def of(cls, stored: Mapping[str, str]) -> Storage:
        """The storage of a matrix with these tensors: dtypes by suffix, of :data:`SUFFIXES`."""
        return next(storage for storage in cls if storage.decoder.recognises(stored))


SUFFIXES = tuple(
    dict.fromkeys(suffix for storage in Storage for part in storage.decoder.parts for suffix in part.suffixes)
)
"""What can follow a matrix's stem."""
WEIGHT_DTYPES = {
    storage.decoder.scheme or storage.value: storage.decoder.parts[0].dtypes
    for storage in (Storage.NVFP4, Storage.MXFP4, Storage.FP8, Storage.PLAIN)
}
"""Dtypes that weights can have, by scheme; every storage has those of its scheme."""
