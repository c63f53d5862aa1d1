"""Break a checkpoint in one way at a time.

Each damage works on a copy that shares its files with the original by hard links; files are replaced, never edited in
place. ``DAMAGES`` says what the error must mention, for tests of the loader and of the server's start alike.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

INDEX = "model.safetensors.index.json"
Stored = dict[str, tuple[str, list[int], bytes]]
"""Tensors of a file: (dtype, shape, data) by name."""


def copy_checkpoint(source: Path, target: Path) -> Path:
    """A copy of ``source`` made of hard links."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def replace_bytes(file: Path, data: bytes) -> None:
    """Give ``file`` new contents without touching what it is linked with."""
    file.unlink()
    file.write_bytes(data)


def load_stored(file: Path) -> Stored:
    """Parse a safetensors file."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (
            entry["dtype"],
            entry["shape"],
            data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }


def store(file: Path, tensors: Stored) -> None:
    """Write a safetensors file with any contents, right or wrong."""
    header, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(data for _, _, data in tensors.values())
    if file.exists():
        file.unlink()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


def file_of(directory: Path, name: str) -> Path:
    """The file that holds tensor ``name``."""
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][name]


def change_tensor(directory: Path, name: str, change: Callable[[str, list[int], bytes], tuple[str, list[int], bytes]]):
    """Replace dtype, shape and data of one tensor."""
    file = file_of(directory, name)
    tensors = load_stored(file)
    tensors[name] = change(*tensors[name])
    store(file, tensors)


def change_json(file: Path, change: Callable[[dict], object]) -> None:
    """Edit a JSON file's object in place of the old one."""
    value = json.loads(file.read_text())
    change(value)
    replace_bytes(file, json.dumps(value).encode())


def set_byte(position: int, value: int) -> Callable[[str, list[int], bytes], tuple[str, list[int], bytes]]:
    """A change for :func:`change_tensor`: one byte of the data."""
    return lambda dtype, shape, data: (dtype, shape, data[:position] + bytes([value]) + data[position + 1 :])


def set_float(position: int, value: float) -> Callable[[str, list[int], bytes], tuple[str, list[int], bytes]]:
    """A change for :func:`change_tensor`: one fp32 element."""

    def change(dtype: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
        assert dtype == "F32"
        values = np.frombuffer(data, "<f4").copy()
        values[position] = value
        return dtype, shape, values.tobytes()

    return change


def remove(directory: Path, name: str) -> None:
    """Take tensor ``name`` out of its file and the index."""
    tensors = load_stored(file := file_of(directory, name))
    del tensors[name]
    store(file, tensors)
    change_json(directory / INDEX, lambda index: index["weight_map"].pop(name))


def _add(directory: Path, name: str, listed: bool = True) -> None:
    file = sorted(directory.glob("*.safetensors"))[0]
    store(file, load_stored(file) | {name: ("BF16", [2], b"\0\0\0\0")})
    if listed:
        change_json(directory / INDEX, lambda index: index["weight_map"].update({name: file.name}))


def _duplicate(directory: Path) -> None:
    first, second, *_ = sorted(directory.glob("*.safetensors"))
    tensors = load_stored(first)
    name = next(iter(tensors))
    store(second, load_stored(second) | {name: tensors[name]})


def _truncate(directory: Path, missing: int) -> None:
    file = sorted(directory.glob("*.safetensors"))[-1]
    replace_bytes(file, file.read_bytes()[:-missing])


def _to_bf16(dtype: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
    return "BF16", shape, data[: len(data) // 2]


def _one_row_less(dtype: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
    return dtype, [shape[0] - 1, *shape[1:]], data[: len(data) // shape[0] * (shape[0] - 1)]


def _rename_all(directory: Path, rename: Callable[[str], str]) -> None:
    for file in directory.glob("*.safetensors"):
        store(file, {rename(name): stored for name, stored in load_stored(file).items()})
    change_json(
        directory / INDEX,
        lambda index: index.update(weight_map={rename(name): f for name, f in index["weight_map"].items()}),
    )


def transformers_name(name: str) -> str:
    """Roughly what a transformers-style export calls a tensor: enough to be recognised as one."""
    if name.startswith("layers."):
        return "model." + name.replace(".attn.", ".self_attn.").replace(".ffn.", ".mlp.")
    return {"head.weight": "lm_head.weight", "embed.weight": "model.embed_tokens.weight"}.get(name, f"model.{name}")


@dataclass(frozen=True)
class Damage:
    """A way to break an ``nvfp4-full`` tiny checkpoint of the default shape.

    ``mentions``: what the one error must contain: file or tensor, what was expected, what was found.
    ``needs_values``: not visible from the headers, so only reading finds it.
    """

    apply: Callable[[Path], None]
    mentions: tuple[str, ...]
    needs_values: bool = False


_GATE = "layers.2.ffn.experts.3.w1"
_Q = "layers.1.attn.wq_b"


def _change(name: str, change: Callable[[str, list[int], bytes], tuple[str, list[int], bytes]]) -> Callable:
    return lambda directory: change_tensor(directory, name, change)


def _config(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda directory: change_json(directory / "config.json", change)


DAMAGES: dict[str, Damage] = {
    "missing tensor": Damage(lambda d: remove(d, f"{_Q}.weight_scale"), (f"{_Q}.weight_scale", "missing")),
    "missing global scale": Damage(
        lambda d: remove(d, f"{_GATE}.weight_scale_2"), (f"{_GATE}.weight_scale_2", "missing")
    ),
    "missing norm": Damage(lambda d: remove(d, "norm.weight"), ("norm.weight", "missing", "BF16 or F32 [256]")),
    "extra tensor": Damage(
        lambda d: _add(d, "layers.0.attn.bias"), ("layers.0.attn.bias", "expected none", "BF16 [2]")
    ),
    "layer too many": Damage(lambda d: _add(d, "layers.5.attn_norm.weight"), ("layers.5.attn_norm.weight",)),
    "extra tensor that is not in the index": Damage(
        lambda d: _add(d, "surprise.weight", listed=False), ("surprise.weight", "not in the index", ".safetensors")
    ),
    "wrong shape": Damage(_change(f"{_Q}.weight", _one_row_less), (f"{_Q}.weight", "[2048, 64]", "[2047, 64]")),
    "wrong shape of a block scale": Damage(
        _change(f"{_GATE}.weight_scale", _one_row_less), (f"{_GATE}.weight_scale", "[128, 16]", "[127, 16]")
    ),
    "wrong dtype": Damage(
        _change("layers.3.attn.attn_sink", _to_bf16), ("layers.3.attn.attn_sink", "expected F32", "found BF16")
    ),
    "truncated file": Damage(lambda d: _truncate(d, 1000), ("-of-00003.safetensors", "truncated", "expected", "found")),
    "file cut in its header": Damage(
        lambda d: replace_bytes(f := sorted(d.glob("*.safetensors"))[1], f.read_bytes()[:100]),
        ("truncated", "found 100"),
    ),
    "absent shard": Damage(
        lambda d: sorted(d.glob("*.safetensors"))[1].unlink(), ("model-00002-of-00003.safetensors", "absent")
    ),
    "stray file": Damage(
        lambda d: store(d / "other.safetensors", {"x": ("F32", [1], b"\0\0\0\0")}), ("other.safetensors", "not listed")
    ),
    "tensor in two files": Damage(_duplicate, ("two files", "00001-of", "00002-of")),
    "NaN block scale": Damage(
        _change(f"{_GATE}.weight_scale", set_byte(37, 0x7F)),
        (f"{_GATE}.weight_scale", "block scales", "found nan", "[2, 5]"),
        needs_values=True,
    ),
    "negative block scale": Damage(
        _change(f"{_Q}.weight_scale", set_byte(8, 0xB0)),
        (f"{_Q}.weight_scale", "block scales", "found -", "[1, 0]"),
        needs_values=True,
    ),
    "negative zero block scale": Damage(
        _change(f"{_Q}.weight_scale", set_byte(0, 0x80)),
        (f"{_Q}.weight_scale", "found -0.0", "[0, 0]"),
        needs_values=True,
    ),
    "infinite global scale": Damage(
        _change(f"{_Q}.weight_scale_2", set_float(0, float("inf"))),
        (f"{_Q}.weight_scale_2", "scale > 0", "found inf"),
        needs_values=True,
    ),
    "NaN global scale": Damage(
        _change(f"{_GATE}.weight_scale_2", set_float(0, float("nan"))),
        (f"{_GATE}.weight_scale_2", "found nan"),
        needs_values=True,
    ),
    "huge global scale": Damage(
        _change(f"{_Q}.weight_scale_2", set_float(0, 1e38)),
        (f"{_Q}.weight_scale_2", "2^8", "found 9.99", ".safetensors"),
        needs_values=True,
    ),
    "block scales that are all zero": Damage(
        _change(f"{_GATE}.weight_scale", lambda dtype, shape, data: (dtype, shape, bytes(len(data)))),
        (f"{_GATE}.weight_scale", "one at least is > 0"),
        needs_values=True,
    ),
    "zero global scale": Damage(
        _change(f"{_GATE}.weight_scale_2", set_float(0, 0.0)),
        (f"{_GATE}.weight_scale_2", "> 0", "found 0.0"),
        needs_values=True,
    ),
    "infinite plain value": Damage(
        _change("layers.2.attn.compressor.ape", set_float(3, float("-inf"))),
        ("layers.2.attn.compressor.ape", "finite", "found -inf", "[0, 3]"),
        needs_values=True,
    ),
    "expert id out of range": Damage(
        _change("layers.1.ffn.gate.tid2eid", set_byte(8 * 13, 16)),
        ("layers.1.ffn.gate.tid2eid", "[0, 16)", "found 16", "[2, 1]"),
        needs_values=True,
    ),
    "transformers' names": Damage(lambda d: _rename_all(d, transformers_name), ("transformers' names", "DeepSeek's")),
    "prefix on some names": Damage(
        lambda d: _rename_all(d, lambda name: f"model.{name}" if name.startswith("layers") else name),
        ("prefix 'model.'", "all or none"),
    ),
    "config without compress_ratios": Damage(
        _config(lambda c: c.pop("compress_ratios")), ("compress_ratios", "missing")
    ),
    "config with other dimensions": Damage(
        _config(lambda c: c.update(q_lora_rank=256)), (".attn.wq_a.weight", "[256, 128]", "[128, 128]")
    ),
    "unknown quant_algo": Damage(
        _config(lambda c: c["quantization_config"].update(quant_algo="NVFP4_AWQ")), ("quant_algo", "NVFP4_AWQ", "MIXED")
    ),
    "quant_algo that contradicts the tensors": Damage(
        _config(lambda c: c["quantization_config"].update(quant_algo="FP8")), ("quant_algo", "NVFP4", "'FP8'")
    ),
    "ignore list that contradicts the tensors": Damage(
        _config(lambda c: c["quantization_config"].update(ignore=["*.attn.*"])), ("ignore", "layers.0.attn.wq_a")
    ),
}


def damaged_copy(source: Path, target: Path, damage: str) -> Path:
    """Copy ``source`` to ``target`` and apply ``DAMAGES[damage]``."""
    DAMAGES[damage].apply(copy_checkpoint(source, target))
    return target
