"""Values at their bounds give finite logits; beyond, or in another byte order, inspect and the server refuse alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nvfp4_sgl import cli
from nvfp4_sgl.checkpoint import values
from nvfp4_sgl.checkpoint.names import Role, mtp_specs, tensor_specs
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.config_fields import READ, YARN
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.support.damage import change_json, change_tensor, copy_checkpoint, file_of, load_stored, store
from tests.support.released import FLASH

SIZES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 6, "num_hash_layers": 1, "index_topk": 8}
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 512, 136)]
"""More than a window, and than the 128 tokens that a layer compresses."""
LARGEST = values.LARGEST


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bounds")
    formats = ("nvfp4-full", "compressed-tensors", "deepseek", "deepseek-base", "bf16")
    for format in formats:
        write_tiny(root / format, format, seed=4, **SIZES)
    return {format: root / format for format in formats}


def test_every_tensor_has_one_class() -> None:
    config = ModelConfig.from_dict(FLASH)
    specs = [*tensor_specs(config).values(), *mtp_specs(config).values()]
    names = {spec.name for spec in specs if not spec.role.is_matrix and spec.role is not Role.TID2EID}
    assert len(names) > 500
    for name in names:
        found = [one for one in values.CLASSES if one.pattern is not None and one.pattern.fullmatch(name)]
        assert len(found) == 1, (name, found)
    rules = {part.rule for storage in Storage for part in storage.decoder.parts}
    assert rules == {one.rule for one in values.CLASSES if one.pattern is None}
    assert values.rule_of("mtp.0.markov_head.weight") is values.finite


def number(dtype: str, value: float) -> bytes:
    return np.float32(value).tobytes()[2:] if dtype == "BF16" else np.float32(value).tobytes()


def filled(value: float, signed: bool = True) -> Callable[[str, list[int], bytes], tuple[str, list[int], bytes]]:
    """A change of a tensor: every value is ``value``, with the sign that it had."""

    def change(dtype: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
        if dtype == "F8_E8M0":
            return dtype, shape, bytes([int(value)]) * len(data)
        width = 2 if dtype == "BF16" else 4
        one = np.frombuffer(number(dtype, value), np.uint8)
        old = np.frombuffer(data, np.uint8).reshape(-1, width)
        new = np.broadcast_to(one, old.shape).copy()
        if signed:
            new[:, -1] |= old[:, -1] & 0x80
        return dtype, shape, new.tobytes()

    return change


def change_all(directory: Path, pattern: str, change: Any) -> list[str]:
    """Change all tensors of the decoder in whose names a pattern is found at the end; the names."""
    changed = []
    for file in directory.glob("*.safetensors"):
        tensors = load_stored(file)
        names = [name for name in tensors if re.search(f"{pattern}$", name) and not name.startswith("mtp.")]
        if names:
            store(file, tensors | {name: change(*tensors[name]) for name in names})
        changed += names
    assert changed, pattern
    return sorted(changed)


def logits(directory: Path) -> torch.Tensor:
    model = Standalone(directory, capacity=256)
    first = model.extend({0: TOKENS[:-1]})[0]
    return torch.cat([first, model.extend({0: TOKENS[-1:]})[0]])


AT: dict[str, tuple[str, tuple[str, ...], float, float]] = {
    "norms": ("nvfp4-full", ("norm.weight",), LARGEST, LARGEST * 1.01),
    "embedding, head": ("nvfp4-full", ("embed.weight", "head.weight"), LARGEST, LARGEST * 1.01),
    "router": ("nvfp4-full", (".gate.weight",), LARGEST, LARGEST * 1.01),
    "router bias": ("nvfp4-full", (".gate.bias",), LARGEST, LARGEST * 1.01),
    "index weights": ("nvfp4-full", (".weights_proj.weight",), LARGEST, LARGEST * 1.01),
    "hyper-connection matrices": ("nvfp4-full", ("_fn",), LARGEST, LARGEST * 1.01),
    "hyper-connection bases": ("nvfp4-full", ("_base",), LARGEST, LARGEST * 1.01),
    "hyper-connection scales": ("nvfp4-full", ("attn_scale", "ffn_scale", "head_scale"), LARGEST, LARGEST * 1.01),
    "sinks": ("nvfp4-full", (".attn_sink",), LARGEST, LARGEST * 1.01),
    "compressor biases": ("nvfp4-full", (".ape",), LARGEST, LARGEST * 1.01),
    "BF16 and F32 matrices": ("bf16", ("wo_a.weight", "wo_b.weight", ".w2.weight"), LARGEST, LARGEST * 1.01),
    "global scales": ("nvfp4-full", (".weight_scale_2",), 2.0**8, 2.0**8 * 1.01),
    "inverse global scales": ("compressed-tensors", (".weight_global_scale",), 2.0**-8, 2.0**-8 / 1.01),
    "UE8M0 scales of MXFP4": ("deepseek", (r"\.experts\.\d\.w[123]\.scale",), 140, 141),
    "UE8M0 scales of FP8": ("deepseek", (".wq_a.scale", ".wkv.scale", ".wo_a.scale", ".wo_b.scale"), 134, 135),
    "F32 and BF16 scales of FP8": ("deepseek-base", (r"\.scale",), 2.0**7, 2.0**7 * 1.01),
}
UNBOUNDED = {"E4M3 weights", "E4M3 block scales", "packed codes"}
"""Classes whose dtype is the bound; test_damage.py has what their rules refuse."""


def test_every_class_is_tried() -> None:
    assert AT.keys() | UNBOUNDED == {one.title for one in values.CLASSES}


def refused(directory: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ``inspect --values`` and the server's reader refuse the checkpoint, and name the tensor."""
    assert cli.main(["inspect", str(directory), "--values", "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert name in {problem["tensor"] for problem in problems if problem["kind"] == "value"}
    with pytest.raises(CheckpointError, match=r"expected .*, found .* at index .*damaged or was exported wrongly"):
        verify(directory).reader().read(name)


@pytest.mark.parametrize("title", AT)
def test_at_the_bound_all_is_finite_and_beyond_refused(
    written: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], title: str
) -> None:
    format, endings, bound, beyond = AT[title]
    directory = copy_checkpoint(written[format], tmp_path / "copy")
    signed = "scales" not in title or title.startswith("hyper")
    # A norm that is negative is no more than a matrix of other signs.
    names = [name for ending in endings for name in change_all(directory, ending, filled(bound, signed))]
    assert cli.main(["inspect", str(directory), "--values"]) == 0
    assert logits(directory).isfinite().all()
    change_tensor(directory, names[0], filled(beyond, signed))
    capsys.readouterr()
    refused(directory, names[0], capsys)


def test_everything_at_its_bound_at_once_is_finite(written: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_checkpoint(written["nvfp4-full"], tmp_path / "copy")
    for format, endings, bound, _ in AT.values():
        for ending in endings if format == "nvfp4-full" else ():
            change_all(directory, ending, filled(bound, signed=ending != ".weight_scale_2"))
    assert logits(directory).isfinite().all()


def set_bounds(raw: dict[str, Any], end: str) -> None:
    """Numbers that no tensor's size depends on, each at the lower or upper end of its bounds."""
    sizes = {"num_experts_per_tok", "num_hash_layers", "num_nextn_predict_layers", "max_position_embeddings", "hc_mult"}
    for field, rule in READ.items():
        if field not in sizes and rule.reason not in ("a size of tensors", READ["n_routed_experts"].reason):
            raw[field] = getattr(rule, end)
    yarn = {field: getattr(rule, end) for field, rule in YARN.items()}
    raw["rope_scaling"] |= yarn | {"beta_fast": YARN["beta_fast"].high, "beta_slow": YARN["beta_slow"].low}


@pytest.mark.parametrize("end", ["low", "high"])
def test_numbers_of_config_json_at_their_bounds(written: dict[str, Path], tmp_path: Path, end: str) -> None:
    directory = copy_checkpoint(written["nvfp4-full"], tmp_path / "copy")
    change_json(directory / "config.json", lambda raw: set_bounds(raw, end))
    raw = json.loads((directory / "config.json").read_text())
    assert {"swiglu_limit", "hc_eps", "hc_sinkhorn_iters", "sliding_window", "rope_theta"} <= {
        field for field in READ if raw[field] == getattr(READ[field], end)
    }
    assert logits(directory).isfinite().all()


@pytest.mark.parametrize("end", ["low", "high"])
@pytest.mark.parametrize("field", ["hc_eps", "rms_norm_eps", "swiglu_limit", "routed_scaling_factor", "rope_theta"])
def test_a_number_of_config_json_at_its_bound(written: dict[str, Path], tmp_path: Path, field: str, end: str) -> None:
    directory = copy_checkpoint(written["nvfp4-full"], tmp_path / "copy")
    change_json(directory / "config.json", lambda raw: raw.update({field: getattr(READ[field], end)}))
    assert logits(directory).isfinite().all()


def swapped(dtype: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
    width = {"BF16": 2, "F32": 4}[dtype]
    return dtype, shape, np.frombuffer(data, np.uint8).reshape(-1, width)[:, ::-1].tobytes()


def test_tensors_of_another_byte_order_are_seen(written: dict[str, Path]) -> None:
    seen: dict[str, list[bool]] = {}
    for format, directory in written.items():
        reader = verify(directory).reader()
        config = verify(directory).config
        own = {spec.name for spec in tensor_specs(config).values() if not spec.role.is_matrix}
        for file in directory.glob("*.safetensors"):
            for name, (dtype, shape, data) in sorted(load_stored(file).items()):
                if dtype not in ("BF16", "F32") or name.startswith("mtp.") or name.endswith(("input_scale", "l_scale")):
                    continue
                _, _, other = swapped(dtype, shape, data)
                part = torch.frombuffer(bytearray(other), dtype=torch.bfloat16 if dtype == "BF16" else torch.float32)
                try:
                    reader.check_values(name, part.view(shape))
                    found = False
                except CheckpointError:
                    found = True
                kind = name if name in own else f"{format} {name.rpartition('.')[2]}"
                seen.setdefault("few" if part.numel() <= 4 else kind, []).append(found)
    few = seen.pop("few")
    assert sum(few) > 0.6 * len(few) > 10, "any mantissa is some exponent: most are seen"
    unseen = {kind for kind, found in seen.items() if not all(found)}
    assert len(seen) > 40 and not unseen, unseen


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm.weight", None),
        ("layers.1.attn.attn_sink", None),
        ("layers.2.attn.compressor.ape", None),
        ("layers.1.ffn.gate.weight", 3e38),
        ("layers.0.attn_norm.weight", 3e38),
        ("layers.0.attn.wq_a.weight_scale_2", 4.6e-41),
        ("layers.0.hc_attn_scale", 1e-30),
        ("head.weight", 1e-39),
    ],
)
def test_inspect_and_the_server_refuse_alike(
    written: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: float | None
) -> None:
    directory = copy_checkpoint(written["nvfp4-full"], tmp_path / "copy")
    change_tensor(directory, name, swapped if value is None else filled(value, signed=False))
    refused(directory, name, capsys)
    with pytest.raises(CheckpointError, match=name):
        Standalone(directory, capacity=256)


def test_few_values_close_to_zero_and_any_zeros_are_taken() -> None:
    rows = torch.ones(4, 64)
    rows[:, :8] = 1e-39
    rows[1] = 0.0
    assert not bool(values.plain(rows)[0].any())
    rows[2, 8] = -1e-39
    found = values.plain(rows)[0]
    assert found[2].sum() == 9 and found.sum() == 9, "the row that has nine of 64"
    assert values.plain(torch.ones(3))[0] is None
    for bad in (float("nan"), float("inf"), -LARGEST * 1.01):
        assert values.plain(torch.tensor([1.0, bad]))[0].tolist() == [False, True]
    scale = torch.tensor(2.0**-100) / 2688
    for good in (scale, torch.tensor(2.0**-117), torch.tensor(1e-5)):
        assert not bool(values.global_scale(good)[0])
    assert bool(values.global_scale(scale * 1.5)[0])


def test_a_large_table_is_checked_in_pieces(
    written: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = copy_checkpoint(written["nvfp4-full"], tmp_path / "copy")
    rows = load_stored(file_of(directory, "head.weight"))["head.weight"][1][0]

    def change(dtype: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
        changed = np.frombuffer(data, np.uint16).reshape(shape).copy()
        changed[rows // 2, 3] = changed[rows - 1, 5] = 0x7F80
        return dtype, shape, changed.tobytes()

    change_tensor(directory, "head.weight", change)
    monkeypatch.setattr("nvfp4_sgl.checkpoint.reader.CHECKED_BYTES", 4096)
    with pytest.raises(CheckpointError, match=rf"found inf at index \[{rows // 2}, 3\] \(2 such values\)"):
        verify(directory).reader().read("head.weight")
    with pytest.raises(CheckpointError, match=rf"found inf at index \[{rows // 2}, 3\] \(1 such values\)"):
        verify(directory).reader().read("head.weight", slice(9, rows // 2 + 1))
