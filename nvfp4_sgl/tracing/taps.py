"""Observes what the boundaries of a decoder give, in the order in which they run, on any target."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_sgl.model.contract import Activation, Columns, Prepared
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.model.layer import Block
from nvfp4_sgl.model.tokens import Gather
from nvfp4_sgl.tracing.values import operand_values, route_weights, selected_set

Observe = Callable[[str, Tensor], None]
"""Called with a name, such as ``layers.3.attn.project_x.kv``, and values [T, ...]."""

PROJECTED_FROM_Q = ("q", "index_q")


@contextmanager
def observing(decoder: Decoder, observe: Observe) -> Iterator[None]:
    """Let ``observe`` see what each boundary gives while the context lasts.

    Values are those between boundaries: of an activation that is handed on in NVFP4 alone, what its codes and scales
    stand for. Routes come as a dense matrix of weights, fp32 [T, experts], chosen entries as
    :func:`.values.selected_set`, so that targets with other containers can be compared.
    """
    undo: list[Callable[[], object]] = []
    experts = decoder.context.config.n_routed_experts
    try:
        for block in decoder.layers:
            assert isinstance(block, Block)
            block.attn.projects_all = True
            undo.append(functools.partial(delattr, block.attn, "projects_all"))
            for name, boundary in block.boundaries():
                undo += _tap(boundary, f"{block.spec.stem}.{name}", experts, observe)
        if decoder.hc_head is not None:
            undo += _tap_site(decoder.hc_head, "hc_head", observe)
        yield
    finally:
        for restore in undo:
            restore()


def _tap(boundary: Any, name: str, experts: int, observe: Observe) -> list[Callable[[], object]]:
    what = name.rpartition(".")[2]
    if what.startswith("hc_"):
        return _tap_site(boundary, name, observe)

    def see(module: nn.Module, arguments: object, output: Any) -> None:
        if what == "route":
            observe(name, route_weights(output, experts))
        elif what == "select":
            observe(name, selected_set(output))
        else:
            for part, values in named_parts(name, output):
                observe(part, values)

    return [boundary.register_forward_hook(see).remove]


def _tap_site(site: Any, name: str, observe: Observe) -> list[Callable[[], object]]:
    """A site's methods are called by name, so hooks of modules do not see them."""
    methods, calls = ("enter", "advance", "leave"), 0

    def tap(method: str) -> None:
        inner = getattr(site, method)

        def call(*arguments: Any, gather: Gather | None = None) -> Any:
            nonlocal calls
            calls += 1
            try:
                output = inner(*arguments, gather=gather)
            finally:
                calls -= 1
            if not calls:  # of a method that another one calls the caller says everything
                for part, values in _site_parts(name, method, output, gather):
                    observe(part, values)
            return output

        object.__setattr__(site, method, call)

    for method in methods:
        tap(method)
    return [functools.partial(object.__delattr__, site, method) for method in methods]


def _site_parts(name: str, method: str, output: Any, gather: Gather | None) -> Iterator[tuple[str, Tensor]]:
    if method == "leave":
        yield f"{name}.left", output
        return
    if method == "advance":
        yield f"{name}.streams", output[1] if gather is None else gather(output[1])
    yield f"{name}.x", operand_values(output[0])


def named_parts(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a boundary's output, by name."""
    match output:
        case Tensor():
            yield name, output
        case Activation():
            yield name, operand_values(output)
        case Columns() | Prepared():
            for field in fields(output):
                # Made here or by ``prepare``, which hands them on: by the target.
                if not (isinstance(output, Columns) and field.name == "index_weights"):
                    yield from named_parts(f"{name}.{field.name}", getattr(output, field.name))
        case None:
            return
        case [Tensor(), *_]:
            yield from zip(_names(name, len(output)), output, strict=True)
        case _:
            raise TypeError(f"{name}: a boundary gave {type(output).__name__}, which is not known here")


def _names(name: str, count: int) -> list[str]:
    """Names of a projection's outputs: the compressors' pairs, what is read from q_lora, the single ones."""
    if count == 1:
        return [name]
    parts = PROJECTED_FROM_Q if name.endswith("project_q") else ("kv", "score")
    return [f"{name}.{part}" for part in parts]


def owned(values: Tensor) -> Tensor:
    """A copy, fp32 or as it is: boundaries write their buffers again."""
    return values.detach().float() if values.dtype != torch.float32 else values.detach().clone()
