"""Whether the weights of one checkpoint can take the place of another's in a model that is built already.

They can if everything that the built model depends on is the same: dimensions, kinds of layers, routing, RoPE, how
each matrix is stored, and shape and dtype of every other tensor. Values may differ, and so may the number and names of
files, scales of activations, which no target reads, and draft layers where nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields

from nvfp4_sgl.checkpoint.names import tensor_specs
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.config_fields import DSPARK
from nvfp4_sgl.files import shown

CONFIG_NAMES = {"layer_kinds": "compress_ratios", "yarn": "rope_scaling"}
"""Fields of :class:`ModelConfig` that config.json calls otherwise."""

UNUSED = ("num_nextn_predict_layers",)
"""Fields of :class:`ModelConfig` that change nothing in what is served."""

RAW_FIELDS = ("activation_mode", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of config.json outside :class:`ModelConfig` that a server has taken over when it started."""


def differences(
    served: Verified, found: Verified, overridden: Collection[str] = (), *, drafted: bool = False
) -> list[str]:
    """Why ``found`` cannot replace ``served``, a line for each field or tensor; empty if it can.

    Args:
        overridden: fields of config.json that the server was told, whatever a file says.
        drafted: whether the draft of ``served`` is to be replaced, too.

    Raises:
        CheckpointError, ConfigError: a draft that is to be replaced, or to replace it, is not complete.
    """
    of_config = [*_of_config(served.config, found.config), *_of_raw(served, found, overridden)]
    if drafted:
        of_config += _of_draft(served, found)
    # Tensors of another model differ all over; the fields say why.
    return of_config or list(_of_tensors(served, found, drafted=drafted))


def _of_draft(served: Verified, found: Verified) -> Iterator[str]:
    kinds = [None if draft is None else draft.kind for draft in (served.draft(), found.draft())]
    if kinds[0] is not kinds[1]:
        yield f"draft: served {kinds[0] or 'none'}, found {kinds[1] or 'none'}"
    for name in sorted({*served.raw, *found.raw}):
        one, other = served.raw.get(name), found.raw.get(name)
        if name.startswith(DSPARK) and one != other:
            yield f"config.json: field '{name}': served {shown(one)}, found {shown(other)}"


def _of_config(served: ModelConfig, found: ModelConfig) -> Iterator[str]:
    for field in fields(ModelConfig):
        one, other = getattr(served, field.name), getattr(found, field.name)
        if one != other and field.name not in UNUSED:
            name = CONFIG_NAMES.get(field.name, field.name)
            yield f"config.json: field '{name}': served {_value(one)}, found {_value(other)}"


def _of_raw(served: Verified, found: Verified, overridden: Collection[str]) -> Iterator[str]:
    for name in RAW_FIELDS:
        one, other = served.raw.get(name), found.raw.get(name)
        if one != other and name not in overridden:
            yield f"config.json: field '{name}': served {shown(one)}, found {shown(other)}"


def _of_tensors(served: Verified, found: Verified, *, drafted: bool) -> Iterator[str]:
    draft = served.draft() if drafted else None
    for spec in (tensor_specs(served.config) | dict(draft.specs if draft else {})).values():
        name = spec.name
        if spec.role.is_matrix:
            one, other = (verified.inventory.storage(name).value for verified in (served, found))
            if one != other:
                yield f"matrix '{name}': served in {one}, found in {other}"
            continue
        entry, changed = served.inventory.entries[name], found.inventory.entries[name]
        if (entry.dtype, entry.shape) != (changed.dtype, changed.shape):
            yield (
                f"tensor '{name}' in {changed.file}: served as {entry.dtype} {list(entry.shape)},"
                f" found {changed.dtype} {list(changed.shape)}"
            )


def _value(value: object) -> str:
    if isinstance(value, tuple):
        value = [kind.value if isinstance(kind, LayerKind) else kind for kind in value]
    return shown(value)
