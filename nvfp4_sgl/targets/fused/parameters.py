"""The weight operands of GEMMs as parameters."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor, nn

from nvfp4_sgl.weights.source import frozen

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Operand = TypeVar("Operand", bound="DataclassInstance")


class Parameters(nn.Module, Generic[Operand]):
    """A dataclass whose tensors are parameters by the names of its fields; ``operand`` is the dataclass of them."""

    def __init__(self, operand: Operand):
        super().__init__()
        values = {field.name: getattr(operand, field.name) for field in fields(operand)}
        tensors = {name: frozen(value) for name, value in values.items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            self.register_parameter(name, tensor)
        self.operand: Operand = replace(operand, **tensors)
