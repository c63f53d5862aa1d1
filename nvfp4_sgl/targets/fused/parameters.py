"""The weight operands of GEMMs as parameters."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor, nn

from nvfp4_sgl.weights.source import frozen

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Weights = TypeVar("Weights", bound="DataclassInstance")


class Parameters(nn.Module, Generic[Weights]):
    """A dataclass whose tensors are parameters by the names of its fields; ``operand`` is the dataclass of them."""

    def __init__(self, weights: Weights):
        super().__init__()
        values = {field.name: getattr(weights, field.name) for field in fields(weights)}
        tensors = {name: frozen(value) for name, value in values.items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            self.register_parameter(name, tensor)
        self.operand: Weights = replace(weights, **tensors)
