"""Matrices that are converted while they are loaded: the same bits as from a converted checkpoint."""

from __future__ import annotations

import logging
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_sgl.build import Serving, needed
from nvfp4_sgl.checkpoint.classes import MatrixClass
from nvfp4_sgl.checkpoint.names import tensor_specs
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.scan import scan
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.convert import matrix
from nvfp4_sgl.convert.at_load import ConvertedAtLoad, converted_at_load
from nvfp4_sgl.convert.options import Options, parse_at_load
from nvfp4_sgl.convert.run import convert
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.errors import CheckpointError, ConfigError
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.serving import arguments
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets import reference
from nvfp4_sgl.targets.target import descriptor
from tests.support.damage import change_tensor, copy_checkpoint, set_byte

SIZES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 8}
"""One layer of each kind."""
ALL = frozenset(MatrixClass)
CASES = {
    "deepseek": ALL,
    "compressed-tensors": ALL,
    "nvfp4-experts": ALL,
    "bf16": frozenset({MatrixClass.EXPERTS, MatrixClass.O_A, MatrixClass.INDEXER}),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[ConvertedAtLoad, Verified]:
    """A checkpoint that is converted at load, and the same one converted on the disk."""
    folder = tmp_path_factory.mktemp("pair")
    write_tiny(folder / "source", request.param, seed=5, **SIZES)
    options = Options(CASES[request.param])
    convert(folder / "source", folder / "target", options, device=torch.device("cpu"))
    return converted_at_load(verify(folder / "source"), options), verify(folder / "target")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.PIECE, "cpu", 1 << 12)


def same(one: Any, other: Any) -> bool:
    """Whether tensors, or the parts of matrices, have the same bits."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and torch.equal(
            one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
        )
    return type(one) is type(other) and all(
        same(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


def counted(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    """Matrices by class, of the table in the log."""
    said = [line.split()[3:] for line in caplog.messages if line.startswith("converted at load:")]
    return {words[0]: int(words[1]) + int(words[2]) for words in said if len(words) == 4 and words[1].isdigit()}


def expected_counts(ours: ConvertedAtLoad) -> dict[str, int]:
    """Matrices by class that are cast or quantised; compressed-tensors' NVFP4 is neither."""
    changed = [
        MatrixClass.of(stem).value
        for stem, was in ours.plan.before.items()
        if was is not ours.plan.after[stem] and was is not Storage.NVFP4_COMPRESSED
    ]
    return dict(Counter(changed))


def test_every_tensor(
    pair: tuple[ConvertedAtLoad, Verified], small_pieces: None, caplog: pytest.LogCaptureFixture
) -> None:
    """What a conversion with other pieces wrote, in any order; its descriptions too."""
    ours, theirs = pair
    one, other = ours.reader(), theirs.reader()
    names = [name for name in theirs.inventory.entries if not name.startswith("mtp.")]
    assert {name for name in ours.inventory.entries if not name.startswith("mtp.")} == set(names)
    for name in random.Random(0).sample(names, len(names)):
        assert same(one.read(name), other.read(name)), name
    with caplog.at_level(logging.INFO):
        one.finish()
    assert counted(caplog) == expected_counts(ours)  # though parts of a matrix were asked for at different times
    assert ours.summary.storages == theirs.summary.storages and ours.summary.format == theirs.summary.format
    assert ours.config == theirs.config
    assert ours.raw["quantization_config"]["quant_algo"] == theirs.raw["quantization_config"]["quant_algo"]


def test_parts_of_matrices(pair: tuple[ConvertedAtLoad, Verified]) -> None:
    """Ranges as ranks read them, in any order."""
    ours, theirs = pair
    one, other, draw = ours.reader(), theirs.reader(), random.Random(1)
    specs = [spec for spec in tensor_specs(ours.config).values() if spec.role.is_matrix]
    for spec in draw.sample(specs, len(specs)):
        n, k = spec.shape
        unit = 128
        rows = slice(*sorted(draw.sample(range(0, n + 1, unit), 2))) if n > unit else None
        cols = slice(*sorted(draw.sample(range(0, k + 1, unit), 2))) if k > unit else None
        assert same(one.read_matrix(spec.name, rows, cols), other.read_matrix(spec.name, rows, cols)), (
            spec.name,
            rows,
            cols,
        )


def test_the_model(pair: tuple[ConvertedAtLoad, Verified], caplog: pytest.LogCaptureFixture) -> None:
    """Loaded whole, nothing left unread; each matrix converted once, and what that lost is said."""
    ours, theirs = pair
    ids = torch.randint(2, 500, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    with caplog.at_level(logging.INFO):
        logits = Standalone(ours, requests=1, capacity=256).extend({0: ids})[0]
    assert torch.equal(logits, Standalone(theirs, requests=1, capacity=256).extend({0: ids})[0])
    assert counted(caplog) == expected_counts(ours)


def test_kernels_and_memory_are_those_of_the_converted(pair: tuple[ConvertedAtLoad, Verified]) -> None:
    """A server compiles and counts by what is loaded, in another process, before anything is read."""
    ours, theirs = pair
    sent = pickle.loads(pickle.dumps(ours))
    found, expected = (
        needed(verified, "sm_90a", Serving(1, 512, 1, 16), descriptor("sm_90a").gpu()) for verified in (sent, theirs)
    )
    assert list(map(str, found[0])) == list(map(str, expected[0])) and list(found[1]) == list(expected[1])


def test_classes() -> None:
    experts_and_o_a = frozenset({MatrixClass.EXPERTS, MatrixClass.O_A})
    assert parse_at_load("all") == Options(ALL) and parse_at_load("experts,o_a") == Options(experts_and_o_a)
    assert parse_at_load("all,drafts") == Options(ALL, drafts=True)
    assert parse_at_load("experts,drafts,o_a") == Options(experts_and_o_a, drafts=True)
    for wrong in ("experts,biases", "", "drafts", "all,experts", 5, None, ["experts"]):
        with pytest.raises(ConfigError, match="convert_at_load: expected all, or classes among experts"):
            parse_at_load(wrong)


@pytest.mark.parametrize("drafts", [False, True], ids=["kept", "converted"])
@pytest.mark.parametrize(("format", "draft"), [("deepseek", "mtp"), ("deepseek", "dspark"), ("bf16", "mtp")])
@torch.no_grad()
def test_a_draft(format: str, draft: str, drafts: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every tensor, and the draft that is built of them; what becomes NVFP4 in it is counted where it is loaded."""
    write_tiny(tmp_path / "source", format, seed=6, draft=draft, num_hidden_layers=3, n_routed_experts=8)
    options = Options(frozenset({MatrixClass.EXPERTS, MatrixClass.SHARED}), drafts=drafts)
    convert(tmp_path / "source", tmp_path / "target", options, device=torch.device("cpu"))
    ours, theirs = converted_at_load(verify(tmp_path / "source"), options), verify(tmp_path / "target")
    described, other = ours.draft(), theirs.draft()
    assert described is not None and other is not None and described == other
    assert drafts == (Storage.NVFP4 in described.storages.values())
    names = [name for name in theirs.inventory.entries if name.startswith("mtp.")]
    assert {name for name in ours.inventory.entries if name.startswith("mtp.")} == set(names)
    readers = ours.draft_reader(), theirs.draft_reader()
    for name in random.Random(0).sample(names, len(names)):
        assert same(readers[0].read(name), readers[1].read(name)), name
    built: list[MtpDraft | DsparkDraft] = []
    for verified in (ours, theirs):
        reader = verified.draft_reader()
        context = Context(reader, verified.config, reference.boundaries())
        elsewhere: tuple[str, ...] = ()
        if draft == "mtp":
            built.append(MtpDraft(context))
        else:
            dspark = DsparkDraft(context, DsparkConfig.parse(verified.raw, verified.config))
            built.append(dspark)
            elsewhere = dspark.unused
        with caplog.at_level(logging.INFO):
            reader.finish(elsewhere)
    one, two = (dict(draft.named_parameters()) for draft in built)
    assert one.keys() == two.keys() and len(one) > 10
    for name, value in one.items():
        assert same(value.detach(), two[name].detach()), name
    is_quantised = [stem for stem, was in ours.plan.drafts.items() if was is not Storage.NVFP4]
    assert sum(counted(caplog).values()) == len(is_quantised)


def test_a_draft_that_is_not_there(tmp_path: Path) -> None:
    write_tiny(tmp_path, "deepseek", seed=5, draft="none", **SIZES)
    with pytest.raises(ConfigError, match="convert_at_load: 'drafts': expected a draft .* found none"):
        converted_at_load(verify(tmp_path), parse_at_load("experts,drafts"))


def test_what_the_server_is_told(tmp_path: Path) -> None:
    write_tiny(tmp_path, "nvfp4-experts", seed=5, **SIZES)
    overrides = arguments.parse_overrides('{"convert_at_load": "shared,kv"}')
    found = arguments.served(tmp_path, None, overrides)
    storages = found.summary.storages
    assert storages["layers.0.attn.wkv"] is Storage.NVFP4 and storages["layers.0.attn.wq_a"] is not Storage.NVFP4
    assert isinstance(arguments.served(tmp_path, None, {}).reader(), CheckpointReader)
    with pytest.raises(ConfigError, match="random weights"):
        arguments.served(tmp_path, "dummy", overrides)
    with pytest.raises(ConfigError, match="found none"):
        arguments.served(tmp_path, None, {"convert_at_load": "experts"})


def test_damage_in_the_source(tmp_path: Path) -> None:
    """NaN in what is converted and in what is copied names its own tensor and file."""
    write_tiny(tmp_path / "good", "bf16", seed=5, **SIZES)
    for name in ("layers.1.attn.wo_b.weight", "layers.1.attn_norm.weight"):
        path = copy_checkpoint(tmp_path / "good", tmp_path / name)
        change_tensor(path, name, set_byte(1, 0x7F))
        change_tensor(path, name, set_byte(0, 0xFF))
        converted = converted_at_load(verify(path), Options())
        with pytest.raises(CheckpointError, match=rf"'{name}'.* in .*{path.name}.*finite"):
            converted.reader().read(name)
    # What is copied is looked at as it is; what is converted fails while it is.
    assert any(name in problem.message for problem in scan(converted, threads=1).problems)
