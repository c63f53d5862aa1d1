"""Random weights with no files: valid, the same for every rank and start, of sane magnitude, routed in balance."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4_sgl.checkpoint.names import Role, tensor_specs
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.errors import CheckpointError, ConfigError
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.claimed import claimed_storages
from nvfp4_sgl.synthetic.dummy import SEED, DummyReader
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.random_words import key_of, random_bytes, words
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config
from nvfp4_sgl.targets.reference.experts import ReferenceRouter
from nvfp4_sgl.weights.parallel import TensorParallel
from tests.support.matrices import values_of
from tests.support.mutation import mutated

CPU = torch.device("cpu")
TOKENS = 512
DRAWN = (TinyFormat.NVFP4_FULL, TinyFormat.NVFP4_EXPERTS, TinyFormat.DEEPSEEK)
"""Formats that random weights can be drawn in."""


def write_config(directory: Path, format: TinyFormat = TinyFormat.NVFP4_FULL, **fields: Any) -> Path:
    """A directory with nothing but config.json."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tiny_config(format, {}) | fields))
    return directory


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture
def dummy(tmp_path: Path) -> Verified:
    return verify_dummy(write_config(tmp_path / "model"))


# --- words --------------------------------------------------------------------------------------------------------


def test_words_are_those_of_python_integers() -> None:
    """The hash written a second time, in integers that cannot overflow."""
    key, width, mask = key_of("a", 3), 7, 0xFFFFFFFF
    found = words(key, range(2**20, 2**20 + 3), range(2, 6), width, CPU)
    for row in range(3):
        for column in range(4):
            x = (((2**20 + row) * width + column + 2) & mask) ^ key[0]
            x = (((x ^ (x >> 16)) * 0x45D9F3B) & mask) ^ key[1]
            x = ((x ^ (x >> 16)) * 0x45D9F3B) & mask
            assert found[row, column] == x ^ (x >> 16)


def test_bytes_are_uniform_and_uncorrelated() -> None:
    drawn = random_bytes(key_of("w", 0), range(512), range(2048), 2048, CPU)
    counts = torch.bincount(drawn.reshape(-1).long(), minlength=256).double()
    expected = drawn.numel() / 256
    assert float(((counts - expected) ** 2 / expected).sum()) < 255 + 6 * math.sqrt(2 * 255)
    x = drawn.double() - 127.5
    other = random_bytes(key_of("v", 0), range(512), range(2048), 2048, CPU).double() - 127.5
    bound = 6 * float(x.square().mean()) / math.sqrt(drawn.numel())
    for a, b in ((x[:, 1:], x[:, :-1]), (x[1:], x[:-1]), (x, other), (x[:, 4:], x[:, :-4])):
        assert abs(float((a * b).mean())) < bound


# --- tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", DRAWN)
def test_written_to_a_file_it_is_a_valid_checkpoint(format: TinyFormat, tmp_path: Path) -> None:
    """The reader of real checkpoints finds every value valid, and gives what the random source gave."""
    folder = write_config(tmp_path / "model", format)
    dummy = verify_dummy(folder)
    source = dummy.reader()
    tensors = {name: source.read(name).clone() for name in dummy.inventory.entries}
    source.finish()
    save_file(tensors, folder / "model.safetensors")
    real = verify(folder)
    expected = "mxfp4-experts" if format is TinyFormat.DEEPSEEK else format.value
    assert real.summary.format == dummy.summary.format == expected
    assert real.summary.nbytes == dummy.summary.nbytes
    reader = real.reader()
    assert not isinstance(reader, DummyReader)
    for name in tensors:
        assert torch.equal(as_bytes(reader.read(name)), as_bytes(source.read(name))), name
    for spec in tensor_specs(real.config).values():
        if real.summary.storages.get(spec.name) is Storage.FP8:
            part = slice(3, spec.shape[0] - 5), slice(spec.shape[1] // 3, spec.shape[1])
            pair = [values_of(each.read_matrix(spec.name, *part)) for each in (reader, source)]
            assert torch.equal(pair[0], pair[1])


@pytest.mark.parametrize("format", DRAWN)
def test_parts_are_parts_of_the_whole(format: TinyFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever range of whichever tensor a rank asks for, and however many words are drawn in one piece."""
    dummy = verify_dummy(write_config(tmp_path / "model", format))
    whole = {name: dummy.reader().read(name) for name in dummy.inventory.entries}
    monkeypatch.setattr("nvfp4_sgl.synthetic.dummy.MAX_WORDS_AT_ONCE", 1000)
    reader = dummy.reader()
    for name, tensor in whole.items():
        if tensor.dim() == 0:
            continue
        n = tensor.shape[0]
        rows = slice(n // 3, n - n // 5)
        assert torch.equal(as_bytes(reader.read(name, rows=rows)), as_bytes(tensor[rows])), name
        if tensor.dim() == 2:
            k = tensor.shape[1]
            cols = slice(k // 3, k - k // 4)
            assert torch.equal(as_bytes(reader.read(name, rows, cols)), as_bytes(tensor[rows, cols])), name


def test_tensors_differ_and_follow_the_seed(dummy: Verified) -> None:
    names = [f"layers.1.ffn.experts.{expert}.w1.weight" for expert in range(4)]
    found = {as_bytes(dummy.reader().read(name)).numpy().tobytes() for name in names}
    assert len(found) == len(names)
    same, other = DummyReader(dummy.inventory, seed=SEED), DummyReader(dummy.inventory, seed=SEED + 1)
    assert as_bytes(same.read(names[0])).numpy().tobytes() in found
    assert as_bytes(other.read(names[0])).numpy().tobytes() not in found


@pytest.mark.parametrize("format", DRAWN)
def test_magnitudes(format: TinyFormat, tmp_path: Path) -> None:
    """A matrix's rms times the root of its width is its gain: within 19 % (global scales are spread) or 10 % (FP8)."""
    dummy = verify_dummy(write_config(tmp_path / "model", format))
    reader = dummy.reader()
    for spec in tensor_specs(dummy.config).values():
        if spec.role not in (Role.LINEAR, Role.EXPERT_LINEAR):
            continue
        storage = reader.storage(spec.name)
        matrix = values_of(reader.read_matrix(spec.name))
        gain = {"w1": 5.0, "w3": 5.0, "w2": 1 / 12}.get(spec.name.rpartition(".")[2], 1.0)
        # Of FP8 the scales are drawn for blocks of 128 x 128, of which a tiny matrix has one or two.
        low, high = (0.5, 2.0) if storage is Storage.FP8 else (0.80, 1.25)
        found = float(matrix.square().mean().sqrt()) * spec.shape[1] ** 0.5 / gain
        assert low < found < high, (spec.name, found)
        assert abs(float(matrix.mean())) < 0.05 * float(matrix.std()), spec.name


def test_fp8_scales_give_the_rms_on_average(tmp_path: Path) -> None:
    """Over many blocks the mean square is what one power of two could not give."""
    dummy = verify_dummy(write_config(tmp_path / "model", TinyFormat.NVFP4_EXPERTS, q_lora_rank=3072))
    matrix = dummy.reader().read_matrix("layers.1.attn.wq_b")
    assert float(matrix.square().mean()) * 3072 == pytest.approx(1.0, rel=0.1)


# --- the model ----------------------------------------------------------------------------------------------------


def prompt(config: ModelConfig, count: int = TOKENS) -> list[int]:
    return torch.randint(2, config.vocab_size, (count,), generator=torch.Generator().manual_seed(5)).tolist()


def deep(folder: Path) -> Path:
    """As many layers as Flash has."""
    ratios = [0, 0, *([4, 128] * 20), 4, 0]
    return write_config(folder, num_hidden_layers=43, compress_ratios=ratios, num_hash_layers=3)


class Watch:
    """Choices of every router and inputs of every expert layer of a model that runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.experts: list[Tensor] = []
        self.streams: list[float] = []
        original = ReferenceRouter.forward

        def forward(router: ReferenceRouter, x: Tensor, token_ids: Tensor, step: Any) -> Any:
            routes = original(router, x, token_ids, step)
            self.experts.append(routes.experts)
            self.streams.append(float(x.square().mean().sqrt()))
            return routes

        monkeypatch.setattr(ReferenceRouter, "forward", forward)


def dispersion(experts: Tensor, count: int) -> float:
    """Chi-square over its degrees of freedom; about 1 if tokens choose independently and uniformly."""
    visits = torch.bincount(experts.reshape(-1), minlength=count).double()
    expected = experts.numel() / count
    return float(((visits - expected) ** 2 / expected).sum()) / (count - 1)


def test_43_layers_stay_finite_and_balanced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert is visited, and none by more than twice its share; logits have the deviation that the head has."""
    dummy, watch = verify_dummy(deep(tmp_path / "deep")), Watch(monkeypatch)
    model = Standalone(dummy, requests=1, capacity=1024)
    logits = model.extend({0: prompt(dummy.config)})[0]
    assert bool(logits.isfinite().all())
    assert 2.0 < float(logits.std()) < 9.0
    assert len(watch.experts) == 43 and all(0.5 < rms < 2.0 for rms in watch.streams)
    count, share = dummy.config.n_routed_experts, TOKENS * dummy.config.num_experts_per_tok / 16
    for layer, experts in enumerate(watch.experts):
        visits = torch.bincount(experts.reshape(-1), minlength=count)
        assert int(visits.min()) > share / 2 and int(visits.max()) < share * 2, (layer, visits.tolist())


def test_uniform_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that route by scores: experts a stride apart from a random base, equal weights, every expert visited."""
    dummy, watch = verify_dummy(write_config(tmp_path / "model")), Watch(monkeypatch)
    config = dummy.config
    plain = Standalone(dummy, requests=1, capacity=1024)
    plain.extend({0: prompt(config)})
    natural, watch.experts = watch.experts, []
    model = Standalone(dummy, requests=1, capacity=1024, uniform_experts=True)
    model.extend({0: prompt(config)})
    for layer, experts in enumerate(list(watch.experts)):
        if config.is_hash_routed(layer):
            assert torch.equal(experts, natural[layer])
            continue
        stride = config.n_routed_experts // config.num_experts_per_tok
        places = torch.arange(config.num_experts_per_tok) * stride
        assert torch.equal(experts, (experts[:, :1] + places) % config.n_routed_experts)
        # Six visits stand or fall together, a stride apart: a dispersion of up to about 2.7 around the mean.
        assert dispersion(experts, config.n_routed_experts) < 6
        route = model.decoder.layers[layer].ffn.route
        weights = route(torch.randn(9, config.hidden_size), torch.zeros(9), None).weights
        assert torch.allclose(weights, torch.full_like(weights, config.routed_scaling_factor / 6), rtol=1e-6)
    bases = [experts[:, 0] for experts in watch.experts[config.num_hash_layers :]]
    assert not torch.equal(bases[0], bases[1])


def test_a_pass_too_large_for_uniform_experts(dummy: Verified) -> None:
    from nvfp4_sgl.model.uniform_experts import MAX_TOKENS, UniformExperts

    with pytest.raises(RuntimeError, match="chunked-prefill-size"):
        UniformExperts(dummy.config, 3, CPU).operands(MAX_TOKENS + 1)


def test_two_ranks_hold_the_parts_of_one(tmp_path: Path) -> None:
    """Every parameter of rank r is that part of the whole model's: same weights whatever the tensor-parallel size."""
    from nvfp4_sgl.weights.layout import attention_matrices, expert_matrices
    from nvfp4_sgl.weights.matrix import load_matrix

    dummy = verify_dummy(write_config(tmp_path / "model"))
    for layer in (1, 2):
        spec = dummy.config.layer(layer)
        whole = attention_matrices(dummy.config, spec, TensorParallel())
        all_experts = expert_matrices(dummy.config, spec, TensorParallel())
        parts = [TensorParallel(rank, 2) for rank in (0, 1)]
        for pick, dim in ((lambda m: m.from_q[0], 0), (lambda m: m.wo_a, 0), (lambda m: m.wo_b, 1)):
            halves = [load_matrix(dummy.reader(), [pick(attention_matrices(dummy.config, spec, p))]) for p in parts]
            joined = torch.cat([half.dequantize() for half in halves], dim)
            assert torch.equal(joined, load_matrix(dummy.reader(), [pick(whole)]).dequantize())
        for expert in (0, 7, dummy.config.n_routed_experts):
            down = [load_matrix(dummy.reader(), [expert_matrices(dummy.config, spec, p)[expert].down]) for p in parts]
            joined = torch.cat([part.dequantize() for part in down], 1)
            assert torch.equal(joined, load_matrix(dummy.reader(), [all_experts[expert].down]).dequantize())


# --- configuration ------------------------------------------------------------------------------------------------


def test_fewer_layers_cut_what_depends_on_them(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", TinyFormat.NVFP4_EXPERTS)
    dummy = verify_dummy(folder, {"num_hidden_layers": 1})
    assert dummy.config.layer_kinds == (LayerKind.SWA,)
    assert dummy.raw["compress_ratios"] == [0, 0] and dummy.config.num_hash_layers == 1
    assert set(dummy.raw["quantization_config"]["quantized_layers"]) == {"layers.0.ffn.experts"}
    assert not any(name.startswith("layers.1.") for name in dummy.inventory.entries)
    # The layers that are left are those of the whole model.
    name = "layers.0.attn.wq_b.weight"
    assert torch.equal(as_bytes(dummy.reader().read(name)), as_bytes(verify_dummy(folder).reader().read(name)))


def test_other_sizes(tmp_path: Path) -> None:
    overrides = {"hidden_size": 512, "n_routed_experts": 32, "num_hidden_layers": 7, "compress_ratios": [0] * 8}
    dummy = verify_dummy(write_config(tmp_path / "model"), overrides)
    assert dummy.config.layer_kinds == (LayerKind.SWA,) * 7
    assert dummy.reader().read_matrix("layers.6.ffn.experts.31.w1").shape == (128, 512)


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "more layers": ({"num_hidden_layers": 9}, "num_hidden_layers 9.*compress_ratios"),
    "no layers": ({"num_hidden_layers": 0}, "model-override-args.*num_hidden_layers"),
    "a word": ({"num_hidden_layers": "many"}, "num_hidden_layers.*many"),
    "too few ratios": ({"num_hidden_layers": 3, "compress_ratios": [0]}, "compress_ratios"),
    "blocks": ({"hidden_size": 100}, "hidden_size.*multiple of 16"),
    "an unknown algorithm": ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W3"}}, "quant_algo"),
    "half of one": ({"quantization_config": {"quant_method": "modelopt"}}, "quant_algo"),
    "no object": ({"quantization_config": 4}, "quantization_config"),
    "compressed-tensors": (
        {"quantization_config": tiny_config(TinyFormat.COMPRESSED_TENSORS, {})["quantization_config"]},
        "random weights.*found compressed-tensors.*null",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        verify_dummy(write_config(tmp_path / "model"), overrides)


def test_storages_of_releases() -> None:
    full = tiny_config(TinyFormat.NVFP4_FULL, {})
    config = ModelConfig.from_dict(full)
    for raw in (full, {name: value for name, value in full.items() if name != "quantization_config"}):
        assert set(claimed_storages(raw, config).values()) == {Storage.NVFP4}
    mixed = claimed_storages(tiny_config(TinyFormat.NVFP4_EXPERTS, {}), config)
    kinds = {stem: ".experts." in stem or "compressor." in stem for stem in mixed}
    assert {mixed[stem] for stem in mixed if ".experts." in stem} == {Storage.NVFP4}
    assert {mixed[stem] for stem in mixed if "compressor." in stem} == {Storage.PLAIN}
    assert {mixed[stem] for stem, special in kinds.items() if not special} == {Storage.FP8}
    fp8 = claimed_storages({"quantization_config": {"quant_method": "fp8"}}, config)
    assert {fp8[stem] for stem in fp8 if "compressor." not in stem} == {Storage.FP8}


def test_unknown_tensors_and_ranges_are_refused(dummy: Verified) -> None:
    reader = dummy.reader()
    with pytest.raises(CheckpointError, match=r"layers\.9\.norm"):
        reader.read("layers.9.norm")
    with pytest.raises(CheckpointError, match="not a range"):
        reader.read("layers.0.attn.wq_a.weight", rows=slice(0, 10**6))
    with pytest.raises(CheckpointError, match="never read"):
        dummy.reader().finish()


# --- mistakes -----------------------------------------------------------------------------------------------------

MISTAKES: Mapping[str, tuple[str, str, str]] = {
    "rows of a slice counted from its start": (
        "synthetic.dummy",
        "row = range(*bounds(entry, name, 0, rows or slice(None)))",
        "row = range((lambda b: b[1] - b[0])(bounds(entry, name, 0, rows or slice(None))))",
    ),
    "columns that begin within a word": (
        "synthetic.random_words",
        "columns.start - 4 * first : columns.stop - 4 * first",
        ": len(columns)",
    ),
    "the width of a part in place of the whole": (
        "synthetic.random_words",
        "range(first, last), -(-width // 4)",
        "range(first, last), last - first",
    ),
}


@pytest.fixture
def part_of_a_part(tmp_path: Path) -> Iterator[Any]:
    folder = write_config(tmp_path / "model")

    def differs() -> bool:
        module = importlib.import_module("nvfp4_sgl.synthetic.random_weights")
        reader: CheckpointReader = module.verify_dummy(folder).reader()
        name, rows, cols = "layers.1.attn.wo_b.weight", slice(64, 128), slice(33, 63)
        part, whole = reader.read(name, rows, cols), reader.read(name)
        return not torch.equal(part, whole[rows, cols])

    yield differs


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str, part_of_a_part: Any) -> None:
    assert not part_of_a_part()
    with mutated(*MISTAKES[mistake]):
        assert part_of_a_part()
