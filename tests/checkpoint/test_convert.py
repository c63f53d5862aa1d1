"""``nvfp4-sgl convert``: what becomes of every tensor, judged by NumPy, and what the result says of itself."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nvfp4_sgl import cli
from nvfp4_sgl.checkpoint.classes import MatrixClass
from nvfp4_sgl.checkpoint.transformers_names import original_name
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.convert import matrix
from nvfp4_sgl.convert.cli import add_arguments, run
from nvfp4_sgl.convert.options import Options, Scales, parse_classes, parse_size
from nvfp4_sgl.convert.run import convert
from nvfp4_sgl.errors import CheckpointError, ConfigError, UnsupportedError
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, TinyNames
from nvfp4_sgl.targets.requirements import check_target
from tests.support import numpy_nvfp4
from tests.support.damage import change_tensor, copy_checkpoint, load_stored, set_byte, store
from tests.support.dequantize import dequantize_checkpoint
from tests.support.oracle import hf_logits, hf_model
from tests.support.prompts import clear_ids

SIZES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 8}
"""One layer of each kind."""
SHARDS = Options(shard_size=1_500_000)
"""Several files."""
EXPERT = "layers.2.ffn.experts.5"
Stored = Mapping[str, tuple[str, list[int], bytes]]


def stored(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Dtype, shape and bytes of every tensor."""
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_stored(file).items()}


def original(name: str) -> str:
    return original_name(name) or name


def matrices(found: Stored) -> set[str]:
    """Stems of the decoder's NVFP4 matrices, in ModelOpt's storage."""
    suffix = ".weight_scale_2"
    return {n.removesuffix(suffix) for n in found if n.endswith(suffix) and not n.startswith("mtp.")}


def quiet(source: Path, target: Path, options: Options = SHARDS) -> Path:
    convert(source, target, options, device=torch.device("cpu"), jobs=2)
    return target


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Operators are small here: on a busy machine several threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("convert")


@pytest.fixture(scope="module")
def sources(root: Path) -> dict[tuple[TinyFormat, TinyNames], Path]:
    found = {}
    for format in TinyFormat:
        for names in TinyNames:
            found[format, names] = root / f"{format.value}-{names.value}"
            write_tiny(found[format, names], format, seed=21, names=names, **SIZES)
    return found


@pytest.fixture(scope="module")
def results(sources: dict[tuple[TinyFormat, TinyNames], Path], root: Path) -> dict[tuple[TinyFormat, TinyNames], Path]:
    """All in NVFP4, by maximum."""
    return {key: quiet(source, root / "full" / source.name) for key, source in sources.items()}


def quantised_by_numpy(w: np.ndarray, amax: float | None = None) -> dict[str, tuple[str, list[int], bytes]]:
    packed, scale, g = numpy_nvfp4.quantize_weight(w, amax)
    return {
        "weight": ("U8", list(packed.shape), packed.tobytes()),
        "weight_scale": ("F8_E4M3", list(scale.shape), scale.tobytes()),
        "weight_scale_2": ("F32", [], g.tobytes()),
    }


def parts(found: Stored, stem: str) -> dict[str, tuple[str, list[int], bytes]]:
    return {name.removeprefix(f"{stem}."): v for name, v in found.items() if name.rpartition(".")[0] == stem}


# --- what becomes of a tensor -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", TinyFormat)
def test_every_tensor_is_what_numpy_makes_of_it(
    format: TinyFormat,
    sources: dict[tuple[TinyFormat, TinyNames], Path],
    results: dict[tuple[TinyFormat, TinyNames], Path],
) -> None:
    before, after = stored(sources[format, TinyNames.ORIGINAL]), stored(results[format, TinyNames.ORIGINAL])
    values = dequantize_checkpoint(sources[format, TinyNames.ORIGINAL])
    stems, seen = matrices(after), set()
    for stem in stems:
        found = parts(after, stem)
        seen |= {f"{stem}.{suffix}" for suffix in found}
        require_numpys(stem, found, parts(before, stem), values[f"{stem}.weight"])
    untouched = {name: value for name, value in after.items() if name not in seen}
    assert untouched == {name: before[name] for name in untouched}
    assert {n for n in before if n.rpartition(".")[0] not in stems} == untouched.keys()
    assert {n.rpartition(".")[0] for n in before if n.startswith("layers.")} >= stems and len(stems) > 100


def require_numpys(stem: str, found: Stored, was: Stored, values: np.ndarray) -> None:
    """A matrix that became NVFP4 is what NumPy makes of what it was."""
    if "weight_scale_2" in was:  # NVFP4 already
        assert found == was, stem
    elif "weight_packed" in was:
        assert found["weight"] == was["weight_packed"] and found["weight_scale"] == was["weight_scale"], stem
        for ours, theirs in (("weight_scale_2", "weight_global_scale"), ("input_scale", "input_global_scale")):
            inverse = np.float32(1) / np.frombuffer(was[theirs][2], np.float32)
            assert found[ours] == ("F32", [], inverse.tobytes()), stem
    elif was["weight"][0] == "I8":  # MXFP4, whose exponents fit
        assert found["weight"] == ("U8", was["weight"][1], was["weight"][2]), stem
        scale = numpy_nvfp4.E4M3[np.frombuffer(found["weight_scale"][2], np.uint8)]
        packed = np.frombuffer(found["weight"][2], np.uint8).reshape(found["weight"][1])
        g = np.frombuffer(found["weight_scale_2"][2], np.float32)
        exact = numpy_nvfp4.dequantize(packed, _bytes(found["weight_scale"])) * g
        assert set(np.log2(scale) % 1) == {0} and np.array_equal(exact, values), stem
    else:
        assert found == quantised_by_numpy(values), stem


def _bytes(value: tuple[str, list[int], bytes]) -> np.ndarray:
    return np.frombuffer(value[2], np.uint8).reshape(value[1])


@pytest.mark.parametrize("format", TinyFormat)
def test_names_of_the_source_make_no_difference(
    format: TinyFormat,
    sources: dict[tuple[TinyFormat, TinyNames], Path],
    results: dict[tuple[TinyFormat, TinyNames], Path],
) -> None:
    ours, theirs = (stored(results[format, names]) for names in TinyNames)
    drafts = {
        n.removeprefix("model."): v for n, v in stored(sources[format, TinyNames.TRANSFORMERS]).items() if "mtp." in n
    }
    assert {n: v for n, v in theirs.items() if n.startswith("mtp.")} == drafts
    assert {n: v for n, v in theirs.items() if n not in drafts} == {
        n: v for n, v in ours.items() if not n.startswith("mtp.")
    }


@pytest.mark.parametrize("only", ["", "experts"])
@pytest.mark.parametrize("format", [TinyFormat.DEEPSEEK, TinyFormat.BF16, TinyFormat.NVFP4_EXPERTS])
def test_drafts_are_converted_on_request(
    format: TinyFormat, only: str, sources: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path
) -> None:
    source = sources[format, TinyNames.ORIGINAL]
    classes = parse_classes(only) if only else frozenset(MatrixClass)
    target = quiet(source, tmp_path / "to", Options(classes, shard_size=1_500_000, drafts=True))
    before, after = stored(source), stored(target)
    values = dequantize_checkpoint(source, drafts=True)
    chosen = {name.removesuffix(".weight") for name in values if re.search(r"\.(experts|shared_experts)\.", name)}
    chosen |= {f"mtp.0.attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")}
    chosen = {stem for stem in chosen if not only or ".experts." in stem}
    assert len(chosen) == 3 * SIZES["n_routed_experts"] + (0 if only else 3 + 5)
    for stem in chosen:
        require_numpys(stem, parts(after, stem), parts(before, stem), values[f"{stem}.weight"])
    drafts = {name for name in after if name.startswith("mtp.")}
    others = {name for name in drafts if name.rpartition(".")[0] not in chosen}
    assert {n: after[n] for n in others} == {n: v for n, v in before.items() if n in others} and len(others) > 10
    assert {n for n in before if n.startswith("mtp.")} - drafts <= {f"{s}.{x}" for s in chosen for x in ("scale",)}
    said = json.loads((target / "config.json").read_text())["quantization_config"]
    for name in drafts:
        stem, _, suffix = name.rpartition(".")
        if suffix != "weight" or len(after[name][1]) != 2:
            continue
        listed = said.get("quantized_layers")
        ignored = any(fnmatchcase(stem, pattern) for pattern in said["ignore"])
        assert ignored == (stem not in chosen), stem
        if listed is not None:
            assert (stem in chosen) == bool({stem, stem.rsplit(".", 2)[0]} & listed.keys()), stem
    draft = verify(target).draft()
    assert draft is not None and {stem for stem, kind in draft.storages.items() if kind.is_nvfp4} == chosen


def test_drafts_that_cannot_be_converted_are_refused(
    sources: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path
) -> None:
    source = sources[TinyFormat.DEEPSEEK, TinyNames.ORIGINAL]
    options = Options(drafts=True)
    bare = copy_checkpoint(source, tmp_path / "bare")
    for file in bare.glob("*.safetensors"):
        store(file, {name: value for name, value in load_stored(file).items() if not name.startswith("mtp.")})
    (bare / "model.safetensors.index.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="--drafts nvfp4: .* no draft"):
        quiet(bare, tmp_path / "to", options)
    wide = copy_checkpoint(source, tmp_path / "wide")
    change_tensor(
        wide, "mtp.0.attn.wkv.weight", lambda dtype, shape, data: (dtype, [shape[0] * 2, shape[1] // 2], data)
    )
    quiet(wide, tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"mtp\.0\.attn\.wkv\.weight.*wrong shape"):
        quiet(wide, tmp_path / "to", options)
    cut = copy_checkpoint(source, tmp_path / "cut")
    for file in cut.glob("*.safetensors"):
        store(file, {name: value for name, value in load_stored(file).items() if name != "mtp.0.enorm.weight"})
    (cut / "model.safetensors.index.json").unlink(missing_ok=True)
    quiet(cut, tmp_path / "cut kept")
    with pytest.raises(
        CheckpointError, match=r"--drafts nvfp4: [\s\S]*'mtp\.0\.enorm\.weight' is missing[\s\S]*leave the"
    ):
        quiet(cut, tmp_path / "to", options)
    damaged = copy_checkpoint(source, tmp_path / "damaged")
    change_tensor(damaged, "mtp.0.attn.wkv.weight", set_byte(5, 0x7F))  # NaN in E4M3
    with pytest.raises(CheckpointError, match=r"'mtp\.0\.attn\.wkv\.weight' in .*expected .*found nan"):
        quiet(damaged, tmp_path / "nan", options)
    normed = copy_checkpoint(source, tmp_path / "normed")
    change_tensor(normed, "mtp.0.enorm.weight", set_byte(1, 0x7F))  # infinite, or NaN, in BF16
    quiet(normed, tmp_path / "normed kept")
    with pytest.raises(CheckpointError, match=r"'mtp\.0\.enorm\.weight' in .*expected finite values"):
        quiet(normed, tmp_path / "normed nan", options)


def test_small_pieces_change_nothing(
    sources: dict[tuple[TinyFormat, TinyNames], Path],
    results: dict[tuple[TinyFormat, TinyNames], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(matrix.PIECE, "cpu", 40_000)
    for format in (TinyFormat.DEEPSEEK_BASE, TinyFormat.BF16):
        again = quiet(sources[format, TinyNames.ORIGINAL], tmp_path / format.value)
        assert stored(again) == stored(results[format, TinyNames.ORIGINAL])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("scales", Scales)
def test_a_gpu_writes_the_same_bytes(
    scales: Scales, sources: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path
) -> None:
    for format in (TinyFormat.DEEPSEEK, TinyFormat.DEEPSEEK_BASE, TinyFormat.BF16):
        source, options = sources[format, TinyNames.ORIGINAL], Options(scales=scales, tie_gate_up=True)
        for device in ("cpu", "cuda"):
            convert(source, tmp_path / format.value / device, options, device=torch.device(device), jobs=2)
        assert stored(tmp_path / format.value / "cuda") == stored(tmp_path / format.value / "cpu")


def test_gate_and_up_are_tied_on_request(
    sources: dict[tuple[TinyFormat, TinyNames], Path],
    results: dict[tuple[TinyFormat, TinyNames], Path],
    tmp_path: Path,
) -> None:
    for format in (TinyFormat.DEEPSEEK, TinyFormat.DEEPSEEK_BASE):
        source = sources[format, TinyNames.ORIGINAL]
        after = stored(quiet(source, tmp_path / format.value, Options(tie_gate_up=True)))
        free, values = stored(results[format, TinyNames.ORIGINAL]), dequantize_checkpoint(source)
        differing = 0
        for owner in {stem.rpartition(".")[0] for stem in matrices(after) if ".ffn." in stem}:
            gate, up = f"{owner}.w1", f"{owner}.w3"
            assert after[f"{gate}.weight_scale_2"] == after[f"{up}.weight_scale_2"]
            differing += free[f"{gate}.weight_scale_2"] != free[f"{up}.weight_scale_2"]
            both = max(float(np.abs(values[f"{stem}.weight"]).max()) for stem in (gate, up))
            for stem in (gate, up):
                if format is TinyFormat.DEEPSEEK and ".shared_experts" not in stem:
                    found = parts(after, stem)
                    exact = numpy_nvfp4.dequantize(_bytes(found["weight"]), _bytes(found["weight_scale"]))
                    g = np.frombuffer(found["weight_scale_2"][2], np.float32)
                    assert np.array_equal(exact * g, values[f"{stem}.weight"])
                else:
                    assert parts(after, stem) == quantised_by_numpy(values[f"{stem}.weight"], both)
        assert differing
        assert parts(after, f"{owner}.w2") == parts(free, f"{owner}.w2")


def test_scales_by_squared_error_lose_less(sources: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path) -> None:
    source = sources[TinyFormat.DEEPSEEK, TinyNames.ORIGINAL]
    losses = {}
    for scales in Scales:
        target = quiet(source, tmp_path / scales.value, Options(scales=scales))
        losses[scales] = json.loads((target / "nvfp4_sgl_manifest.json").read_text())["losses"]
        before, after = dequantize_checkpoint(source), dequantize_checkpoint(target)
        names = [n for n in before if n.endswith((".wq_a.weight", "attn.wq_b.weight")) and ".indexer." not in n]
        error, square = (
            sum(np.square(part, dtype=np.float64).sum() for part in x)
            for x in (
                [after[n].astype(np.float64) - before[n] for n in names],
                [before[n] for n in names],
            )
        )
        said = losses[scales]["q"]
        assert said["quantised"] == len(names) == 6
        assert said["relative_rms_error"] == pytest.approx((error / square) ** 0.5, rel=1e-3)
    assert all(
        losses[Scales.MSE][k]["relative_rms_error"] < 0.92 * of["relative_rms_error"]
        for k, of in losses[Scales.MAX].items()
        if of["quantised"]
    )
    assert losses[Scales.MAX]["experts"] == losses[Scales.MSE]["experts"]


# --- MXFP4 that does not fit --------------------------------------------------------------------------------------


def _with_scales(source: Path, target: Path, stem: str, scales: Mapping[int, int]) -> Path:
    """A copy in which blocks of an MXFP4 matrix, by their place, have other exponents."""
    copy_checkpoint(source, target)
    for place, byte in scales.items():
        change_tensor(target, f"{stem}.scale", set_byte(place, byte))
    return target


def test_mxfp4_that_does_not_fit_is_quantised_and_named(
    sources: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """…and the whole model is what its files say, block scales by squared error."""
    source = _with_scales(
        sources[TinyFormat.DEEPSEEK, TinyNames.ORIGINAL], tmp_path / "wide", f"{EXPERT}.w1", {3: 100, 4: 119}
    )
    with pytest.raises(CheckpointError, match=rf"'{EXPERT}\.w1'"):
        verify(source).reader().read_matrix(f"{EXPERT}.w1")
    by_maximum = stored(quiet(source, tmp_path / "max"))
    wide = dequantize_checkpoint(source)[f"{EXPERT}.w1.weight"]
    assert parts(by_maximum, f"{EXPERT}.w1") == quantised_by_numpy(wide)
    capsys.readouterr()
    target = quiet(source, tmp_path / "mse", Options(scales=Scales.MSE))
    out = capsys.readouterr().out
    assert "1 MXFP4 matrices have no exact NVFP4 form" in out and f"{EXPERT}.w1: block exponents from -27 to" in out
    said = json.loads((target / "nvfp4_sgl_manifest.json").read_text())["losses"]["experts"]
    assert said["exact_casts"] == 71 and said["quantised"] == 1 and list(said["without_exact_form"]) == [f"{EXPERT}.w1"]
    model = hf_model(target)
    ids = clear_ids(model, 200, seed=4)
    ours = Standalone(target, capacity=256).extend({1: ids})[1].log_softmax(-1)
    assert (ours - hf_logits(model, ids).log_softmax(-1)).abs().max().item() <= 1e-4


def test_what_fits_alone_may_not_fit_tied(sources: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path) -> None:
    """A block of zeros has no say in it."""
    whole = sources[TinyFormat.DEEPSEEK, TinyNames.ORIGINAL]
    exponents = np.frombuffer(stored(whole)[f"{EXPERT}.w3.scale"][2], np.uint8)
    source = _with_scales(whole, tmp_path / "apart", f"{EXPERT}.w3", {0: int(exponents.max()) - 17})
    gates = np.frombuffer(stored(whole)[f"{EXPERT}.w1.scale"][2], np.uint8)
    change_tensor(source, f"{EXPERT}.w1.scale", set_byte(7, int(exponents.max()) + 1))
    assert int(exponents.max()) + 1 - int(gates.min()) <= 17, "the gate fits alone"
    zeroed = "layers.1.ffn.experts.2.w1"
    change_tensor(source, f"{zeroed}.weight", lambda d, s, data: (d, s, bytes([0x80] * 16) + data[16:]))
    change_tensor(source, f"{zeroed}.scale", set_byte(0, 3))
    for tied, inexact in ((False, set()), (True, {f"{EXPERT}.w1", f"{EXPERT}.w3"})):
        tally = convert(source, tmp_path / str(tied), Options(tie_gate_up=tied), device=torch.device("cpu"))
        assert tally is not None and set(tally.classes[MatrixClass.EXPERTS].inexact) == inexact
    values, after = dequantize_checkpoint(source), stored(tmp_path / "True")
    both = max(float(np.abs(values[f"{EXPERT}.{w}.weight"]).max()) for w in ("w1", "w3"))
    assert parts(after, f"{EXPERT}.w3") == quantised_by_numpy(values[f"{EXPERT}.w3.weight"], both)


def test_values_beyond_bounds_are_refused(sources: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path) -> None:
    source = _with_scales(sources[TinyFormat.DEEPSEEK, TinyNames.ORIGINAL], tmp_path / "huge", f"{EXPERT}.w2", {1: 254})
    with pytest.raises(CheckpointError, match=rf"'{EXPERT}\.w2\.scale' .* UE8M0 scales of at most 2\^13"):
        quiet(source, tmp_path / "result")
    assert not (tmp_path / "result" / "config.json").exists()


# --- choices, and what the result says of itself ------------------------------------------------------------------

CHOICES: Mapping[str, tuple[TinyFormat, str, str]] = {
    "experts of BF16": (TinyFormat.BF16, "experts", ""),
    "experts of Base": (TinyFormat.DEEPSEEK_BASE, "experts", ""),
    "experts of DeepSeek": (TinyFormat.DEEPSEEK, "experts", ""),
    "experts of compressed-tensors": (TinyFormat.COMPRESSED_TENSORS, "experts", ""),
    "all but experts": (TinyFormat.DEEPSEEK, "", "experts"),
    "all but o_a and compressors": (TinyFormat.NVFP4_EXPERTS, "", "o_a,compressor,indexer"),
    "q and shared": (TinyFormat.BF16, "q,shared", ""),
}
PATTERNS = {
    "experts": ("*.ffn.experts.*",),
    "shared": ("*.shared_experts.*",),
    "q": ("layers.?.attn.wq_a", "layers.?.attn.wq_b"),
    "kv": ("layers.?.attn.wkv",),
    "o_a": ("*.wo_a",),
    "o_b": ("*.wo_b",),
    "compressor": ("layers.?.attn.compressor.*",),
    "indexer": ("*.indexer.*",),
}


def class_by_pattern(stem: str) -> str:
    (kind,) = (kind for kind, patterns in PATTERNS.items() if any(fnmatchcase(stem, p) for p in patterns))
    return kind


@pytest.mark.parametrize("case", CHOICES)
def test_classes_that_are_not_chosen_stay_as_they_are(
    case: str, sources: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path
) -> None:
    format, only, keep = CHOICES[case]
    source = sources[format, TinyNames.TRANSFORMERS]
    flags = ["--only", only] if only else ["--keep", keep]
    assert cli.main(["convert", str(source), str(tmp_path / "to"), "--device", "cpu", *flags]) == 0
    before = {original(name): value for name, value in stored(source).items()}
    after, was = stored(tmp_path / "to"), verify(source)
    chosen = set(only.split(",")) if only else PATTERNS.keys() - set(keep.split(","))
    nvfp4 = matrices(after)
    for stem, storage in was.summary.storages.items():
        expected = class_by_pattern(stem) in chosen or (storage.is_nvfp4 and storage.value.startswith("NVFP4"))
        assert (stem in nvfp4) == expected, stem
        if not expected:
            kept = {name.replace("weight_scale_inv", "scale"): v for name, v in parts(before, stem).items()}
            if format is TinyFormat.COMPRESSED_TENSORS:
                kept = {name.replace("weight_scale", "scale"): v for name, v in kept.items()}
            assert parts(after, stem) == kept, stem
    # What is written about them, read by its plain meaning.
    said = json.loads((tmp_path / "to" / "config.json").read_text())["quantization_config"]
    assert said["quant_algo"] == "MIXED_PRECISION" and ("moe_quant_algo" in said) == ("experts" in chosen)
    listed = said["quantized_layers"].keys()
    for stem in was.summary.storages:
        around = {stem, stem.rsplit(".", 2)[0]} if ".experts." in stem else {stem}
        assert (stem in nvfp4) == bool(around & listed), stem
        assert (stem in nvfp4) != any(fnmatchcase(stem, pattern) for pattern in said["ignore"]), stem
    stored_as = {value[0] for name, value in after.items() if name.endswith(".weight") and "layers." in name[:7]}
    assert said["quant_method"] == ("fp8" if stored_as & {"F8_E4M3", "I8"} else "modelopt")


@pytest.mark.parametrize("format", TinyFormat)
def test_the_result_runs_on_sm100(
    format: TinyFormat,
    sources: dict[tuple[TinyFormat, TinyNames], Path],
    results: dict[tuple[TinyFormat, TinyNames], Path],
) -> None:
    source, result = verify(sources[format, TinyNames.ORIGINAL]), verify(results[format, TinyNames.ORIGINAL])
    assert result.summary.format == "nvfp4-full"
    if format in (TinyFormat.DEEPSEEK_BASE, TinyFormat.BF16):
        with pytest.raises(UnsupportedError, match="expected routed experts in NVFP4"):
            check_target("sm_100a", source.config, 1, source.inventory.storage)
    check_target("sm_100a", result.config, 1, result.inventory.storage)
    assert result.summary.skipped == source.summary.skipped
    words = json.loads((results[format, TinyNames.ORIGINAL] / "config.json").read_text())
    said = words["quantization_config"]
    assert (said["quant_method"], said["quant_algo"], words["expert_dtype"]) == ("modelopt", "NVFP4", "fp4")
    manifest = json.loads((results[format, TinyNames.ORIGINAL] / "hf_quant_config.json").read_text())
    assert manifest["producer"]["name"] == "modelopt" and manifest["quantization"]["quant_algo"] == "NVFP4"


def test_small_files_come_along_and_others_stay(
    sources: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path
) -> None:
    source = copy_checkpoint(sources[TinyFormat.DEEPSEEK, TinyNames.ORIGINAL], tmp_path / "source")
    (source / "encoding" / ".hidden").mkdir(parents=True)
    (source / "encoding" / "chat.py").write_text("print()\n")
    (source / "encoding" / ".hidden" / "x").write_text("x")
    (source / "old.bin").write_bytes(b"weights")
    target = quiet(source, tmp_path / "target")
    names = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert {name for name in names if not name.endswith(".safetensors")} == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "encoding/chat.py"),
        *("hf_quant_config.json", "model.safetensors.index.json", "nvfp4_sgl_manifest.json"),
    }
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    texts = [file.read_text() for file in target.glob("*.json")]
    assert len(texts) > 5 and not any(str(tmp_path) in text for text in texts), "a path of this machine"


# --- command line -------------------------------------------------------------------------------------------------


def test_it_says_what_happens_before_it_does(
    sources: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(sources[TinyFormat.DEEPSEEK, TinyNames.ORIGINAL])
    assert cli.main(["convert", source, str(tmp_path / "to"), "--keep", "kv", "--dry-run"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert rows["experts"] == "72 MXFP4 NVFP4 exact if exponents fit"
    assert rows["q"] == "6 FP8 NVFP4 lossy" and rows["kv"] == "3 FP8 kept, bit for bit"
    assert "MTP draft: " in out and "byte for byte" in out
    assert max(map(len, out.splitlines())) <= 80 and not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "experts,router"], "experts, shared, q, kv, o_a, o_b, compressor, indexer.*'router'"),
        (["--shard-size", "5 apples"], "a size such as 5GB.*'5 apples'"),
        (["--jobs", "0"], "from 1 to 1024, found '0'"),
        (["--only", "q", "--keep", "kv"], "not allowed with"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["convert", "a", "b", *flags])
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_nothing_to_convert_and_no_such_device(
    sources: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path
) -> None:
    source = sources[TinyFormat.BF16, TinyNames.ORIGINAL]
    with pytest.raises(ConfigError, match="no matrix would be NVFP4"):
        quiet(source, tmp_path / "to", Options(classes=frozenset()))
    for device in ("cuda:99", "meta"):
        with pytest.raises(UnsupportedError, match=f"--device {device}"):
            convert(source, tmp_path / "to", SHARDS, device=torch.device(device))
    with pytest.raises(UnsupportedError, match="--device gpu: expected cpu, cuda"):
        _run_with_device(source, tmp_path, "gpu")
    assert not (tmp_path / "to").exists()


def _run_with_device(source: Path, root: Path, device: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    run(parser.parse_args([str(source), str(root / "to"), "--device", device]))


def test_sizes_and_classes_are_parsed() -> None:
    sizes = {"5GB": 5 * 10**9, "1.5 GiB": 3 * 2**29, "800M": 8 * 10**8, "123": 123, "2KiB": 2048}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GB", "-5GB", "0", "1e9", "5TB", "9" * 400):
        with pytest.raises(ValueError, match="expected a size"):
            parse_size(text)
    assert parse_classes("q,o_a") == {MatrixClass.Q, MatrixClass.O_A}


def test_checksums_are_verified(
    results: dict[tuple[TinyFormat, TinyNames], Path],
    sources: dict[tuple[TinyFormat, TinyNames], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = results[TinyFormat.DEEPSEEK, TinyNames.ORIGINAL]
    assert cli.main(["inspect", str(whole), "--checksums"]) == 0
    assert f"checksums: all {len(stored(whole))} tensors match" in capsys.readouterr().out
    for name in ("layers.1.attn.wq_b.weight", "mtp.0.enorm.weight"):
        changed = copy_checkpoint(whole, tmp_path / name)
        change_tensor(changed, name, lambda d, s, data: (d, s, data[:5] + bytes([data[5] ^ 1]) + data[6:]))
        assert cli.main(["inspect", str(changed), "--checksums"]) == 1
        out = capsys.readouterr().out
        assert "WRONG, 1 problem" in out and f"'{name}' in model-" in out
    assert cli.main(["inspect", str(sources[TinyFormat.BF16, TinyNames.ORIGINAL]), "--checksums"]) == 2
    assert "only what 'nvfp4-sgl convert' wrote has checksums" in capsys.readouterr().err
