"""The architectures that are served: DeepSeek-V4, and those that installed packages add. Needs no torch.

Another package adds an :class:`Architecture` under the entry point group :data:`GROUP`. Architectures differ in how
their config.json is read; what follows from the :class:`~nvfp4_sgl.config.ModelConfig` is the same for all.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nvfp4_sgl.config import ARCHITECTURE, DRAFT_ARCHITECTURE, DSPARK_ARCHITECTURE, ModelConfig
from nvfp4_sgl.config_fields import unknown_fields
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.extensions import added, imported

GROUP = "nvfp4_sgl.architectures"


class ReadConfig(Protocol):
    """A reader of config.json."""

    def __call__(self, raw: Mapping[str, Any], *, source: str) -> ModelConfig:
        """The config that ``raw`` states; ``source`` names it in errors.

        Raises:
            ConfigError: it is not servable; names the field.
        """


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        name: the first of config.json's ``architectures``.
        read: its reader of config.json.
        fields: names of fields that ``read`` takes from config.json and DeepSeek-V4's has not: ``inspect`` calls all
            other unknown ones unread.
        class_in: ``module:class`` that SGLang instantiates: DeepSeek-V4's, or one derived from it.
        draft: SGLang's name of its draft; empty if it has none. draft_in: ``module:class`` of the draft.
        dspark, dspark_in: the same of its DSpark draft.
    """

    name: str
    read: ReadConfig
    fields: tuple[str, ...] = ()
    class_in: str = "nvfp4_sgl.serving.model:DeepseekV4ForCausalLM"
    draft: str = ""
    draft_in: str = "nvfp4_sgl.serving.drafts.model:MtpForCausalLM"
    dspark: str = ""
    dspark_in: str = "nvfp4_sgl.serving.drafts.dspark_model:DsparkForCausalLM"

    @property
    def names(self) -> list[str]:
        """SGLang's names of it and of its drafts."""
        return [name for name in (self.name, self.draft, self.dspark) if name]

    def classes(self) -> dict[str, Any]:
        """The classes that SGLang instantiates, by the names it knows; imports them."""
        places = {self.name: self.class_in, self.draft: self.draft_in, self.dspark: self.dspark_in}
        return {name: imported(places[name]) for name in self.names}


DEEPSEEK_V4 = Architecture(ARCHITECTURE, ModelConfig.from_dict, draft=DRAFT_ARCHITECTURE, dspark=DSPARK_ARCHITECTURE)


@functools.cache
def architectures() -> tuple[Architecture, ...]:
    """Every architecture.

    Raises:
        UnsupportedError: what another package adds cannot be imported, is none, or is one that is there already.
    """
    found = [DEEPSEEK_V4]
    for where, each in added(GROUP, Architecture):
        known = {name for one in found for name in one.names}
        if again := [name for name in each.names if name in known]:
            raise UnsupportedError(
                f"{where}: expected a new architecture, found {again[0]}, which is registered already; rename it, or"
                " remove that package"
            )
        found.append(each)
    return tuple(found)


def read_config(raw: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
    """The config that a config.json states, by the reader of its architecture; DeepSeek-V4's refuses unknown ones.

    Raises:
        ConfigError: it is not servable.
    """
    return _of(raw).read(raw, source=source)


def unread_fields(raw: Mapping[str, Any]) -> list[str]:
    """Fields of a config.json that the reader of its architecture does not know."""
    own = _of(raw).fields
    return [name for name in unknown_fields(raw) if name not in own]


def _of(raw: Mapping[str, Any]) -> Architecture:
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return next((each for each in architectures() if each.name == first), DEEPSEEK_V4)


def is_served(names: object, *, drafts: bool = False) -> bool:
    """Whether ``architectures`` of a config.json, whatever it is, names one that is served; with ``drafts``, or its
    draft."""
    known = {name for each in architectures() for name in (each.names if drafts else [each.name])}
    return isinstance(names, list | tuple) and any(isinstance(name, str) and name in known for name in names)
