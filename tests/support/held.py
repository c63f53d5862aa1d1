"""What a module holds in memory."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from nvfp4_sgl.ops.linear import PreparedWeight


def tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, and what the reference keeps beside them."""
    yield from module.parameters()
    for part in module.modules():
        for value in vars(part).values():
            for item in value if isinstance(value, list | tuple) else [value]:
                if isinstance(item, PreparedWeight):
                    yield from (tensor for tensor in (item.values, item.alpha) if tensor is not None)


def held_bytes(module: nn.Module) -> int:
    """Of all of them, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.nbytes for t in tensors(module) if t.numel()}
    return sum(storages.values())
