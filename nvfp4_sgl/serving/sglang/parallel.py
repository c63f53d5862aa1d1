"""Tensor-parallel ranks and their collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from nvfp4_sgl.serving.sglang.ledger import find


def tp_rank() -> int:
    """This process's tensor-parallel rank."""
    return int(find("get_parallel")().tp_rank)


def tp_size() -> int:
    """Number of tensor-parallel ranks."""
    return int(find("get_parallel")().tp_size)


def tp_all_reduce(tensor: Tensor) -> Tensor:
    """Sum of ``tensor`` over the tensor-parallel ranks."""
    return find("tensor_model_parallel_all_reduce")(tensor)


def tp_reduce_scatter(tensor: Tensor) -> Tensor:
    """This rank's rows of the sum of ``tensor`` [size * n, ...] over the tensor-parallel ranks; contiguous."""
    own, group = tensor.new_empty(len(tensor) // tp_size(), *tensor.shape[1:]), find("get_tp_group")()
    if tensor.is_cpu:  # for which SGLang has these operators in its own CPU engine alone
        torch.distributed.reduce_scatter_single(own, tensor, group=group.device_group)
    else:
        group.reduce_scatter_tensor(own, tensor)
    return own


def tp_all_gather(tensor: Tensor) -> Tensor:
    """Every tensor-parallel rank's ``tensor`` [n, ...], in their order: [size * n, ...]; contiguous."""
    rows, group = tensor.new_empty(len(tensor) * tp_size(), *tensor.shape[1:]), find("get_tp_group")()
    if tensor.is_cpu:
        torch.distributed.all_gather_single(rows, tensor, group=group.device_group)
    else:
        group.all_gather_into_tensor(rows, tensor)
    return rows


@contextmanager
def graph_capture() -> Iterator[torch.cuda.Stream]:
    """Inside, collectives may be captured, on the stream that is given; at the end ranks exchange their buffers."""
    with find("graph_capture")() as found:
        yield found.stream


def tp_gather_columns(tensor: Tensor) -> Tensor:
    """Every tensor-parallel rank's ``tensor`` [n, k], side by side in their order: [n, size * k]; contiguous."""
    parts = tp_all_gather(tensor).view(tp_size(), *tensor.shape)
    return parts.transpose(0, 1).reshape(len(tensor), -1)


def tp_cpu_group() -> torch.distributed.ProcessGroup:
    """The tensor-parallel ranks' process group for tensors on the CPU."""
    return find("get_tp_group")().cpu_group


def reaches_peers() -> bool:
    """Whether SGLang's all-reduce goes through the memory of the other ranks' GPUs, and waits for them in every pass.

    The one that it had before, and takes without NVLink, gives zeros at once in the passes that precede a capture.
    """
    communicator = find("get_tp_group")().ca_comm
    return isinstance(communicator, find("CustomAllReduceV2")) and not communicator.disabled


def tp_broadcast(tensor: Tensor) -> None:
    """Make ``tensor`` that of the first tensor-parallel rank, on all ranks; contiguous."""
    if tp_size() > 1:
        find("get_tp_group")().broadcast(tensor, src=0)


def tp_exchange(value: Any) -> list[Any]:
    """Every tensor-parallel rank's ``value``, in their order; over sockets."""
    values: list[Any] = [None] * tp_size()
    torch.distributed.all_gather_object(values, value, group=tp_cpu_group())
    return values
