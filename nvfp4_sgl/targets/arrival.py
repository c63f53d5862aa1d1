"""The forms in which a matrix comes from its decoder (:mod:`nvfp4_sgl.checkpoint.decoders`)."""

from __future__ import annotations

import enum

from nvfp4_sgl.checkpoint.storage import Storage


class Arrival(enum.Enum):
    """The form in which a matrix comes from its decoder."""

    NVFP4 = "NVFP4"
    MXFP8 = "values that MXFP8 holds exactly"
    SCALED = "values with scales of more bits"
    PLAIN = "values as they are stored"

    @classmethod
    def of(cls, storage: Storage) -> Arrival:
        """The form of a matrix in ``storage``."""
        if storage.is_nvfp4:
            return cls.NVFP4
        if storage.is_mxfp8:
            return cls.MXFP8
        return cls.SCALED if storage.decoder.scheme else cls.PLAIN
