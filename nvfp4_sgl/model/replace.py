"""Give a built decoder the weights of another checkpoint, in its own storages.

Captured CUDA graphs hold addresses of weights, so tensors keep theirs: each layer is built once more by the code that
built it first, with all merges and layouts, its tensors are copied over the old ones, and it is let go.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_sgl.errors import CheckpointError, Nvfp4SglError
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.decoder import Decoder, final_collapse
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.layer import Block
from nvfp4_sgl.model.mtp import MtpDraft

BOOKKEEPING = frozenset(vars(nn.Module()))
"""Attributes of every module that hold hooks and flags; parameters, buffers and modules are looked at by themselves."""

COMPARED = (bool, int, float, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
"""Types of values that follow from config.json: they must be what they were."""

WORKSPACE_FACTOR = 2
"""Bound on what building a layer needs, as a multiple of its tensors: itself, and merged matrices before they are laid
out. Experts, most of a layer, are read a few at a time."""


def replace_weights(decoder: Decoder, context: Context) -> None:
    """Load every tensor of ``decoder`` again from ``context.source``, into where it is.

    Args:
        context: that of the decoder with another source: a checkpoint that differs in values alone
            (:mod:`nvfp4_sgl.checkpoint.interchange`).

    Raises:
        CheckpointError: something could not be read or does not fit; layers before it are replaced already, so the
            decoder must not run any more.
    """
    for layer, block in zip(decoder.range, decoder.layers, strict=True):
        _replace(f"layers.{layer}", block, lambda layer=layer: Block(context, context.config.layer(layer)))
    if decoder.hc_head is not None:
        _replace("hc_head", decoder.hc_head, lambda: final_collapse(context))
    decoder.context = context


def replace_draft(draft: MtpDraft | DsparkDraft, context: Context) -> None:
    """The same of a draft: every tensor again, into where it is."""
    _replace(
        "mtp", draft, lambda: MtpDraft(context) if isinstance(draft, MtpDraft) else DsparkDraft(context, draft.dspark)
    )
    draft.context = context


def workspace_bytes(decoder: Decoder) -> int:
    """Bytes of the decoder's device that :func:`replace_weights` needs beside what is there."""
    layers = (sum(t.nbytes for _, t, _ in pairs("", block, block)) for block in decoder.layers)
    return WORKSPACE_FACTOR * max(layers, default=0)


@torch.no_grad()
def _replace(name: str, old: object, build: Any) -> None:
    try:
        # All of them are found before the first is copied: what does not fit leaves this layer as it was.
        for _, target, source in list(pairs(name, old, build())):
            target.copy_(source)
    except Nvfp4SglError:
        raise
    except Exception as error:
        raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from error


def pairs(
    name: str, old: object, new: object, seen: set[tuple[int, int]] | None = None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, tensor of ``old`` and tensor of ``new`` for each place in which they hold one, each pair once.

    Modules, dataclasses, lists, tuples and dictionaries are searched.

    Raises:
        CheckpointError: they are not built alike; names where.
    """
    seen = set() if seen is None else seen
    if (id(old), id(new)) in seen:
        return
    seen.add((id(old), id(new)))
    if type(old) is not type(new):
        raise _unlike(name, type(old).__name__, type(new).__name__)
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        one, other = ((t.dtype, t.device, tuple(t.shape), t.stride()) for t in (old, new))
        if one != other:
            raise _unlike(name, one, other)
        yield name, old, new
    elif isinstance(new, COMPARED):
        if old != new:
            raise _unlike(name, old, new)
    else:
        ours, theirs = _children(old), _children(new)
        for key, child in theirs.items():
            if key not in ours:
                raise _unlike(f"{name}.{key}", "nothing", type(child).__name__)
            yield from pairs(f"{name}.{key}", ours[key], child, seen)


def _children(value: object) -> dict[str, Any]:
    """The parts of a value, by name."""
    if isinstance(value, nn.Module):
        own = {key: child for key, child in vars(value).items() if key not in BOOKKEEPING}
        return {**value._parameters, **value._buffers, **value._modules, **own}
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): child for key, child in value.items()}
    if isinstance(value, list | tuple):
        return {str(len(value)): len(value), **{str(index): child for index, child in enumerate(value)}}
    return {}


def _unlike(name: str, served: object, found: object) -> CheckpointError:
    return CheckpointError(f"{name}: served {served}, the new weights need {found}")
