"""Forecasts of memory against dimensions multiplied out by hand, tensors that are held, and SGLang's own sizing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl import cli, prompt_sizes
from nvfp4_sgl.cache.layout import DRAFTED_STATE_RING, STATE_RING, Rings
from nvfp4_sgl.checkpoint import modelopt_words
from nvfp4_sgl.checkpoint.drafts import Draft, DraftKind
from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.summary import CheckpointSummary
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.memory import plan
from nvfp4_sgl.memory.forecast import GRAPH_LAYER_BYTES, Forecast, dspark_buffers, forecast
from nvfp4_sgl.memory.pools import (
    LEAST_WINDOW_TOKENS,
    bytes_per_server,
    bytes_per_token,
    draft_bytes_per_token,
    largest_chunk,
    least_tokens,
)
from nvfp4_sgl.memory.setting import Setting
from nvfp4_sgl.memory.weights import EXPERTS, MATRICES, OTHERS, VOCABULARY, draft_weight_bytes, weight_bytes
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.serving import kv_pool
from nvfp4_sgl.sglang_defaults import PACKED_SWA_RATIO
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.random_weights import RandomWeights, verify_dummy
from nvfp4_sgl.synthetic.tiny_config import BASE, TinyFormat, tiny_config
from nvfp4_sgl.targets.target import modes, words
from nvfp4_sgl.weights.parallel import Ownership, TensorParallel
from tests.support.held import held_bytes
from tests.support.mutation import mutated

GB = 10**9

FLASH = BASE | {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 256,
    "num_hash_layers": 3,
    "index_n_heads": 64,
    "index_topk": 512,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
}
PRO = FLASH | {
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "n_routed_experts": 384,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0],
    "routed_scaling_factor": 2.5,
}


def parameters(
    d: int, inner: int, experts: int, heads: int, q_lora: int, groups: int, csa: int, hca: int, layers: int
) -> tuple[int, int]:
    """(elements of expert matrices, of other NVFP4 matrices): DeepSeek's dimensions multiplied out."""
    attention = (
        q_lora * d + 512 * d + heads * 512 * q_lora + groups * 1024 * (heads * 512 // groups) + d * groups * 1024
    )
    csa_more = 2 * 1024 * d + 2 * 256 * d + 64 * 128 * q_lora
    return layers * experts * 3 * d * inner, layers * attention + csa * csa_more + hca * 2 * 512 * d


RELEASES: Mapping[str, tuple[dict[str, Any], tuple[int, ...], float, float]] = {
    # config, dimensions, parameters in total, GB of routed experts (both specification §11)
    "Flash": (FLASH, (4096, 2048, 256, 64, 1024, 8, 21, 20, 43), 284.3e9, 155.8),
    "Pro": (PRO, (7168, 3072, 384, 128, 1536, 16, 30, 31, 61), 1573.0e9, 870.4),
}
FLASH_BYTES_PER_TOKEN = 7087
"""Packed entries, SGLang's default share of window rows."""


@pytest.mark.parametrize("release", RELEASES)
def test_weights_of_the_releases(release: str) -> None:
    """NVFP4 is 0.5625 bytes a weight. An fp32 alpha a row adds 0.3 % to dense matrices, next to nothing to experts."""
    raw, dimensions, total, routed = RELEASES[release]
    config = ModelConfig.from_dict(raw)
    d, inner, layers = dimensions[0], dimensions[1], dimensions[-1]
    expert_elements, other_elements = parameters(*dimensions)
    shared = layers * 3 * d * inner
    assert expert_elements * 0.5625 / GB == pytest.approx(routed, abs=0.05)
    every = expert_elements + shared + other_elements + 2 * 129280 * d
    assert every == pytest.approx(total, rel=2e-3)  # without routers, norms, mHC
    for ranks in (1, 2, 4, 8):
        found = weight_bytes(config, lambda stem: Storage.NVFP4, "sm_100a", Ownership(size=ranks), 2)
        assert found[EXPERTS] == pytest.approx((expert_elements + shared) * 0.5625 / ranks, rel=1e-3)
        assert found[VOCABULARY] == 2 * 129280 * d * 2 // ranks
        assert found[MATRICES] >= other_elements * 0.5625 / ranks
    whole = weight_bytes(config, lambda stem: Storage.NVFP4, "sm_100a", Ownership(), 2)
    assert whole[MATRICES] == pytest.approx(other_elements * 0.5625, rel=4e-3)
    on_hopper = weight_bytes(config, lambda stem: Storage.NVFP4, "sm_90a", Ownership(), 2)[EXPERTS]
    assert on_hopper == pytest.approx((expert_elements + shared) * 0.5625, rel=1e-3)
    assert (
        weight_bytes(config, lambda stem: Storage.FP8, "sm_90a", Ownership(), 2)[EXPERTS]
        == (expert_elements + shared) * 2
    )
    on_cpu = weight_bytes(config, lambda stem: Storage.NVFP4, "cpu", Ownership(), 4)
    assert on_cpu[EXPERTS] == pytest.approx((expert_elements + shared) * 4, rel=1e-3)


def test_fp8_takes_a_byte_a_weight_on_hopper() -> None:
    """And 512 bytes a tile of 16,384. From the input only the two layers without compressors are packed."""
    config = ModelConfig.from_dict(FLASH)

    def bytes_of(others: Storage) -> Mapping[str, int]:
        def storage(stem: str) -> Storage:
            return Storage.NVFP4 if ".ffn.experts." in stem else Storage.PLAIN if "compressor" in stem else others

        return weight_bytes(config, storage, "sm_90a", Ownership(), 2)

    fp8, bf16 = bytes_of(Storage.FP8), bytes_of(Storage.FP8_FLOAT_SCALES)
    shared = 43 * 3 * 4096 * 2048
    assert bf16[EXPERTS] - fp8[EXPERTS] == pytest.approx(shared * (2 - 33 / 32), rel=1e-6)
    packed = 43 * (32768 * 1024 + 2 * 8192 * 4096) + 21 * 64 * 128 * 1024 + 2 * 1536 * 4096
    assert bf16[MATRICES] - fp8[MATRICES] == pytest.approx(packed * (2 - 33 / 32), rel=1e-6)


def test_flash_as_its_headers_say() -> None:
    """161.7 GB were measured from the headers of a generated checkpoint, 81.3 and 41.0 GB for ranks of two and four."""
    config = ModelConfig.from_dict(FLASH)
    for ranks, measured in ((1, 161.7), (2, 81.3), (4, 41.0)):
        found = weight_bytes(config, lambda stem: Storage.NVFP4, "sm_100a", Ownership(size=ranks), 2)
        assert sum(found.values()) / GB == pytest.approx(measured, abs=0.15)


def test_pools_of_flash() -> None:
    config = ModelConfig.from_dict(FLASH)
    token = bytes_per_token(config, None, PACKED_SWA_RATIO)
    window, entry, state = 43 * 585, 21 * (585 + 132) / 4 + 20 * 864 / 128, 21 * 8 / 256 * 4 * (512 + 128) * 4
    assert sum(token.values()) == pytest.approx(0.1 * (window + state) + entry)
    assert round(sum(token.values())) == FLASH_BYTES_PER_TOKEN
    server = bytes_per_server(config, 256, 1 << 20)
    # A ring of 128 rows of 512 + 512 fp32 for 257 slots and one spare ring and row, up to whole rings.
    assert server["ratio-128 states"] == 20 * 259 * 128 * 1024 * 4
    assert server["table of slots"] == 257 * (2**20 + 4) * 4


@pytest.mark.parametrize("rings", [STATE_RING, DRAFTED_STATE_RING], ids=["plain", "drafted"])
@pytest.mark.parametrize("row_bytes", [2, 4])
def test_pools_as_sglang_sizes_exact_rows(row_bytes: int, rings: Rings) -> None:
    config = ModelConfig.from_dict(FLASH)
    configurator = kv_pool.exact_rows_configurator()
    sizing = configurator.__new__(configurator)
    kinds = [kind.value for kind in config.layer_kinds]
    owners = {ratio: [n for n, kind in enumerate(kinds) if kind == ratio] for ratio in (4, 128)}
    for name, value in {
        "row_bytes": row_bytes,
        "attn_head_dim": 512,
        "indexer_head_dim": 128,
        "encoder_replay": False,
        "ring_sizes": rings,
        "page_size": 256,
        "num_layers_total": 43,
        "stage_owner_layers": owners,
        "_unified": False,
        "swa_cap_tokens": None,
        "swa_ratio": 0.5,
        "disaggregation_mode": "null",
    }.items():
        setattr(sizing, name, value)
    sizing.bytes_per_swa_token = sizing._get_bytes_per_swa_token()
    token = bytes_per_token(config, row_bytes, 0.5, rings=rings)
    assert sum(token.values()) == pytest.approx(sizing._get_bytes_per_full_token())
    server = bytes_per_server(config, 16, 4096, rings=rings)
    assert server["ratio-128 states"] == sizing._get_c128_state_fixed_bytes(16)


# --- drafts -------------------------------------------------------------------------------------------------------

DSPARK = {"dspark_block_size": 5, "dspark_noise_token_id": 128799}
FLASH_DSPARK = (
    FLASH
    | DSPARK
    | {
        "compress_ratios": [*FLASH["compress_ratios"], 0, 0],
        "dspark_markov_rank": 256,
        "dspark_target_layer_ids": [40, 41, 42],
    }
)
PRO_DSPARK = (
    PRO
    | DSPARK
    | {
        "compress_ratios": [*PRO["compress_ratios"], 0, 0],
        "dspark_markov_rank": 512,
        "dspark_target_layer_ids": [58, 59, 60],
    }
)


def released(raw: dict[str, Any]) -> Draft:
    """The draft of a release with that config: experts in MXFP4, other matrices in FP8."""
    storages = {"expert_dtype": "fp4", "quantization_config": dict(modelopt_words.FP8_BLOCKS)}
    config, inventory = ModelConfig.from_dict(raw), Inventory(Path("release"), {})
    draft = RandomWeights(raw | storages, config, inventory, CheckpointSummary(inventory.directory)).draft()
    assert draft is not None
    return draft


def test_dspark_of_flash_as_its_headers_say() -> None:
    """4705 tensors of 10.863 GB were counted in the headers of the release, 2329 of them scales."""
    draft = released(FLASH_DSPARK)
    assert (draft.kind, draft.stages, draft.block, draft.tensors) == (DraftKind.DSPARK, 3, 5, 4705)
    assert len(draft.storages) == 2329 and draft.nbytes / GB == pytest.approx(10.863, abs=0.001)
    assert draft.not_read == ("mtp.2.confidence_head.proj.weight",)


BLOCKS: Mapping[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "Flash, MTP": (FLASH, (4096, 2048, 256, 64, 1024, 8), 1),
    "Flash, DSpark": (FLASH_DSPARK, (4096, 2048, 256, 64, 1024, 8), 3),
    "Pro, MTP": (PRO, (7168, 3072, 384, 128, 1536, 16), 1),
    "Pro, DSpark": (PRO_DSPARK, (7168, 3072, 384, 128, 1536, 16), 3),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_weights_of_drafts(name: str) -> None:
    """A block is a window-only layer; MTP has 2 d² in front of it, DSpark 3 d² and twice vocabulary · rank behind."""
    raw, dimensions, stages = BLOCKS[name]
    draft, d = released(raw), dimensions[0]
    experts, matrices = parameters(*(*dimensions, 0, 0, stages))
    shared = stages * 3 * d * dimensions[1]
    others = matrices + shared + (2 if stages == 1 else 3) * d * d
    markov = 0 if stages == 1 else 2 * 129280 * raw["dspark_markov_rank"] * 2
    assert draft.nbytes == pytest.approx(experts * (0.5 + 1 / 32) + others + markov, rel=3e-3)
    config = ModelConfig.from_dict(raw)
    on_hopper = draft_weight_bytes(config, draft, "sm_90a", Ownership())
    assert on_hopper == pytest.approx((experts + shared) * 0.5625 + (others - shared) + markov, rel=0.05)
    two = [draft_weight_bytes(config, draft, "sm_90a", Ownership(size=ranks)) for ranks in (1, 2)]
    assert 0.5 < two[1] / two[0] < 0.6


def test_buffers_of_dspark() -> None:
    """Three layers' means of a chunk and their projection; fp32 logits of five guesses of each request."""
    config = ModelConfig.from_dict(FLASH_DSPARK)
    setting = Setting(1, 48, 1 << 20, 8192, 2, None, 0.1, 0.85, draft=DraftKind.DSPARK, round_tokens=6)
    context, logits = dspark_buffers(config, released(FLASH_DSPARK), setting).values()
    assert context == 8192 * (3 * 4096 * 2 + 4096 * 4 + 4096 * 2) and logits == 48 * 5 * 129280 * 4


@pytest.mark.parametrize(("raw", "csa", "hca", "plain"), [(FLASH, 21, 20, 12.2), (PRO, 30, 31, 18.7)])
def test_states_of_drafted_requests(raw: dict[str, Any], csa: int, hca: int, plain: float) -> None:
    """MB a request: a ring for each HCA layer, one in its page of window rows for each CSA layer. Drafts double it."""
    config, found = ModelConfig.from_dict(raw), []
    for rings in (STATE_RING, DRAFTED_STATE_RING):
        token, more = (bytes_per_token(config, None, 1.0, rings=rings), 2 * 64 - 1)
        server = [bytes_per_server(config, requests, 0, rings=rings)["ratio-128 states"] for requests in (1, 1 + more)]
        found.append((server[1] - server[0]) / more + 256 * token["ratio-4 states"])
        assert found[-1] == pytest.approx(hca * rings[128] * 1024 * 4 + csa * rings[4] * 4 * 640 * 4, rel=0.01)
    assert found[0] / 1e6 == pytest.approx(plain, abs=0.06) and found[1] / found[0] == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(("raw", "kept"), [(FLASH, 180.4), (FLASH_DSPARK, 180.4), (PRO, 181.6)])
def test_rows_of_drafts(raw: dict[str, Any], kept: float) -> None:
    """584 bytes, and what pads a page, for each window row of a stage; SGLang keeps a layer's share of all pools."""
    config, draft = ModelConfig.from_dict(raw), released(raw)
    token = bytes_per_token(config, None, PACKED_SWA_RATIO, rings=DRAFTED_STATE_RING)
    sizes: dict[str, Any] = {"stages": draft.stages, "layers": config.num_hidden_layers}
    assert draft_bytes_per_token(config, {}, None, 1.0, **sizes) == draft.stages * 585
    assert draft_bytes_per_token(config, token, None, PACKED_SWA_RATIO, **sizes) == pytest.approx(kept, abs=0.1)


# --- what a decoder holds -----------------------------------------------------------------------------------------


def model(folder: Path, format: TinyFormat = TinyFormat.NVFP4_FULL) -> Verified:
    (folder / "config.json").write_text(json.dumps(tiny_config(format, {"vocab_size": 512})))
    return verify_dummy(folder)


def held(verified: Verified, target: str, mode: ActivationMode, ranks: int, layers: range | None = None) -> int:
    parallel = TensorParallel(0, ranks)
    alone = Standalone(verified, target=target, mode=mode, capacity=256, requests=1, parallel=parallel, layers=layers)
    return held_bytes(alone.decoder)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("format", [TinyFormat.NVFP4_FULL, TinyFormat.NVFP4_EXPERTS])
@pytest.mark.parametrize(("target", "mode"), [(target, mode) for target in words() for mode in modes(target)])
def test_weights_are_what_a_decoder_holds(
    target: str, mode: ActivationMode, format: TinyFormat, ranks: int, tmp_path: Path
) -> None:
    verified = model(tmp_path, format)
    found = weight_bytes(verified.config, verified.inventory.storage, target, Ownership(size=ranks), 4, mode)
    assert found[EXPERTS] + found[MATRICES] + found[OTHERS] == held(verified, target, mode, ranks)


STAGES = (range(2), range(2, 4), range(4, 5))


@pytest.mark.parametrize("target", ["cpu", "sm_100a"])
def test_a_stage_holds_its_layers(target: str, tmp_path: Path) -> None:
    """The embedding is with the first, the final collapse and the head with the last."""
    verified, mode = model(tmp_path), modes(target)[0]
    for stage in STAGES:
        found = weight_bytes(verified.config, verified.inventory.storage, target, Ownership(), 4, mode, stage)
        assert found[EXPERTS] + found[MATRICES] + found[OTHERS] == held(verified, target, mode, 1, stage), stage
        assert bool(found[VOCABULARY]) is (stage != STAGES[1])


def test_stages_together_are_the_whole() -> None:
    setting = Setting(1, 16, 4096, 2048, 2, None, 0.1, 0.85)
    stages = [range(20), range(20, 43)]
    whole = forecast(FLASH_VERIFIED, "sm_90a", setting, None)
    parts = [forecast(FLASH_VERIFIED, "sm_90a", setting, None, stage=stage) for stage in stages]
    assert all(sum(part.weights[name] for part in parts) == nbytes for name, nbytes in whole.weights.items())
    for name, nbytes in whole.token.items():
        assert sum(part.token[name] for part in parts) == pytest.approx(nbytes)
    assert sum(part.server["ratio-128 states"] for part in parts) == whole.server["ratio-128 states"]


@pytest.mark.parametrize("layers", [range(3, 3), range(4, 2), range(40, 44), range(0, 4, 2), range(-1, 3)])
def test_layers_that_are_no_stage(layers: range) -> None:
    with pytest.raises(ValueError, match="expected some of"):
        FLASH_VERIFIED.config.stage(layers)


def test_fp32_sums_of_w4a4_on_hopper_are_estimated() -> None:
    setting = Setting(1, 256, 1 << 20, 8192, 2, None, 0.1, 0.85)
    plain, rounded = (forecast(FLASH_VERIFIED, "sm_90a", setting, None, mode) for mode in modes("sm_90a"))
    name = "activations of a prefill chunk"
    # Gate and up of seven experts a token, two more bytes for each value; or what wq_b gives.
    assert rounded.estimated[name] - plain.estimated[name] >= 8192 * 7 * 2 * 2048 * 2


def test_graphs_of_prompts_are_estimated() -> None:
    """Activations of the largest; scores of a million tokens where those of few decode requests are too few."""
    plain = Setting(1, 256, 1 << 20, 8192, 2, None, 0.1, 0.85)
    name, chunk = "prompt graphs", "activations of a prefill chunk"
    assert name not in forecast(FLASH_VERIFIED, "sm_90a", plain, None).estimated
    found = forecast(FLASH_VERIFIED, "sm_90a", replace(plain, prompt_tokens=2048), None).estimated
    slots, graphs = 4096 * 8192 * 4, 8
    assert found[name] == found[chunk] // 4 + slots + graphs * 43 * GRAPH_LAYER_BYTES
    few = forecast(FLASH_VERIFIED, "sm_90a", replace(plain, requests=16, prompt_tokens=2048), None).estimated
    assert few[name] == found[name] + (256 << 20)
    one = forecast(FLASH_VERIFIED, "sm_90a", replace(plain, prompt_tokens=256), None).estimated
    assert one[name] == found[chunk] // 32 + slots // 8 + 2 * 43 * GRAPH_LAYER_BYTES


def test_graphs_of_prompts_take_as_much_as_recorded() -> None:
    """launch/results/flash_tp2_h200.md: 0.96 GB, in servers laid out for 64 requests and for 256."""
    for requests in (64, 256):
        setting = Setting(2, requests, 16384, 8192, 2, None, 0.1, 0.8, prompt_tokens=2048)
        found = forecast(FLASH_VERIFIED, "sm_90a", setting, None).estimated["prompt graphs"]
        assert found == pytest.approx(0.96e9, rel=0.03)


@pytest.mark.parametrize(
    ("raw", "each"), [(FLASH, 4 * 4096 * 2), (FLASH_DSPARK, 3 * 4096 * 2 + 4096 * 4 + 4096 * 2)], ids=["mtp", "dspark"]
)
def test_graphs_of_prompts_hold_what_a_draft_reads(raw: dict[str, Any], each: int, tmp_path: Path) -> None:
    """Streams of the largest, or the context that DSpark's stages are given of it."""
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    verified = verify_dummy(tmp_path)
    draft = verified.draft()
    assert draft is not None
    drafted = Setting(1, 48, 1 << 20, 8192, 2, None, 0.1, 0.85, draft=draft.kind, round_tokens=6, prompt_tokens=2048)
    name = "prompt graphs"
    alone = forecast(verified, "sm_90a", replace(drafted, draft=None), None).estimated
    assert forecast(verified, "sm_90a", drafted, None).estimated[name] == alone[name] + 2048 * each


def test_a_planned_server_captures_prompts_with_a_draft_too(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, config = released(FLASH_DSPARK), ModelConfig.from_dict(FLASH_DSPARK)
    for by_default, tokens in ((True, 2048), (False, 0)):
        monkeypatch.setattr(prompt_sizes, "BY_DEFAULT", by_default)
        settings = [plan.ServerFlags().setting("sm_90a", config, one) for one in (None, draft)]
        assert [setting.prompt_tokens for setting in settings] == [tokens, tokens]


@pytest.mark.parametrize(("given", "tokens"), [(None, 2048), ("", 2048), ("0", 0), ("1", 2048)])
def test_a_planned_server_has_the_switch_of_prompts(
    given: str | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(prompt_sizes.SWITCH, raising=False)
    if given is not None:
        monkeypatch.setenv(prompt_sizes.SWITCH, given)
    assert plan.ServerFlags().setting("sm_90a", ModelConfig.from_dict(FLASH)).prompt_tokens == tokens


def test_a_wrong_switch_of_prompts_is_refused_in_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prompt_sizes.SWITCH, "yes")
    with pytest.raises(ConfigError, match=f"{prompt_sizes.SWITCH}: expected 0 or 1, found 'yes'"):
        plan.ServerFlags().setting("sm_90a", ModelConfig.from_dict(FLASH))


def test_no_planned_graph_has_more_tokens_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(prompt_sizes.SWITCH, raising=False)
    assert [prompt_sizes.planned(chunk) for chunk in (255, 256, 1500, 8192)] == [0, 256, 1024, 2048]


# --- the sum ------------------------------------------------------------------------------------------------------


def flash(free: int | None, **changes: Any) -> Forecast:
    fields: dict[str, Any] = {
        "ranks": 2,
        "requests": 256,
        "context": 1 << 20,
        "chunk": 8192,
        "dtype_bytes": 2,
        "row_bytes": None,
        "swa_ratio": 0.1,
        "fraction": 0.85,
    } | changes
    return forecast(FLASH_VERIFIED, "sm_100a", Setting(**fields), free)


class _Headers:
    """Headers of a checkpoint all in NVFP4."""

    @staticmethod
    def storage(stem: str) -> Storage:
        return Storage.NVFP4


FLASH_VERIFIED: Any = type("V", (), {"config": ModelConfig.from_dict(FLASH), "inventory": _Headers})


def test_tokens_that_fit() -> None:
    found = flash(140 * GB)
    expected = (140 * GB * 0.85 - found.fixed) / sum(found.token.values())
    assert found.tokens is not None and 0 <= expected - found.tokens < 256 and found.tokens % 256 == 0
    assert found.problem() is None
    found.check()
    assert flash(140 * GB, most_tokens=4096).tokens == 4096
    assert flash(None).tokens is None and flash(None).problem() is None
    least = found.fixed + 10240 * sum(found.token.values())
    assert flash(int(least / 0.85) + 10**6).problem() is None
    assert flash(int(least / 0.85) - 10**6).problem() is not None


@pytest.mark.parametrize("pages", range(40))
def test_chunks_have_room_beside_a_cached_prefix(pages: int) -> None:
    """What SGLang wants for a chunk is fewer tokens than the longest cached node leaves, and a page more is not."""

    def has_room(chunk: int) -> bool:
        locked = max(chunk - 256, 256)  # a node: the chunk of an earlier prompt, whose last page is one of its own
        return chunk + 256 < pages * 256 - locked

    chunk = largest_chunk(pages * 256 + 255)
    assert chunk % 256 == 0 and not has_room(chunk + 256)
    assert has_room(chunk) if chunk else pages * 256 < LEAST_WINDOW_TOKENS


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.3, 0.5, 0.7, 1.0])
def test_least_tokens(ratio: float) -> None:
    found = least_tokens(ratio)
    assert found % 256 == 0 and int(found * ratio) >= LEAST_WINDOW_TOKENS > (found - 256) * ratio


def test_small_window_pools() -> None:
    """A small one has smaller chunks, a smaller one is refused by the flags to change."""
    assert not any(line.startswith("prefill chunk") for line in flash(140 * GB).lines())
    small = flash(140 * GB, most_tokens=40960)
    assert small.problem() is None
    assert any("1,792  not 8,192" in line for line in small.lines() if line.startswith("prefill chunk"))
    problem = flash(140 * GB, most_tokens=9984).problem()
    assert problem is not None
    for text in ("found 768 tokens, expected at least 1024", "10240 tokens in all", "--max-total-tokens"):
        assert text in problem
    assert flash(140 * GB, most_tokens=9984, window_by_ratio=False).problem() is None


REFUSED: Mapping[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "weights": (80 * GB, {}, ("--tp-size 2", "80.00 GB free", "68.00 GB", "experts 78.22", "a larger --tp-size")),
    "fraction": (110 * GB, {"fraction": 0.5}, ("raise --mem-fraction-static above 0.77",)),
    "requests": (140 * GB, {"requests": 4096}, ("ratio-128 states 42.9", "--max-running-requests")),
    "workspaces": (100 * GB, {"fraction": 0.99, "chunk": 1 << 17}, ("estimated", "exceed 100.00 GB")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_too_little_memory(case: str) -> None:
    free, changes, texts = REFUSED[case]
    with pytest.raises(UnsupportedError) as error:
        flash(free, **changes).check()
    for text in texts:
        assert text in str(error.value), error.value


def test_a_split_that_does_not_divide() -> None:
    with pytest.raises(ConfigError, match="--tp-size 3"):
        flash(140 * GB, ranks=3)


def test_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvfp4_sgl.targets.choose.detect_target", lambda: "cpu")
    model(tmp_path)
    assert cli.main(["doctor", str(tmp_path), "--tp", "2"]) == 0
    out = capsys.readouterr().out
    assert "weights: none here; counted by config.json" in out and "RANDOM" not in out
    assert "Memory of a rank, --tp 2" in out and "ratio-128 states" in out
    assert cli.main(["doctor", str(tmp_path), "--tp", "2", "--target", "sm_100a", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["free"] is None and memory["weights"][EXPERTS] > 0
    assert cli.main(["doctor", str(tmp_path), "--tp", "3"]) == 1
    out = capsys.readouterr().out
    assert "--tp 3: " in out and "use a smaller --tp" in out and "--tp-size" not in out
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    monkeypatch.setattr("nvfp4_sgl.memory.free.free_bytes", lambda ranks: 24 * GB)
    assert cli.main(["doctor", str(tmp_path)]) == 1
    assert "PROBLEM: memory: too little memory" in capsys.readouterr().out


def test_a_mistake_is_noticed() -> None:
    """Experts that are not split over ranks."""
    import importlib

    line = "experts += nbytes"
    with mutated("memory.weights", line, "experts += nbytes * owner.size"):
        module = importlib.import_module("nvfp4_sgl.memory.weights")
        config = importlib.import_module("nvfp4_sgl.config").ModelConfig.from_dict(FLASH)
        target = "sm_100a"
        nvfp4 = importlib.import_module("nvfp4_sgl.checkpoint.storage").Storage.NVFP4
        assert (
            sum(module.weight_bytes(config, lambda stem: nvfp4, target, Ownership(size=2), 2).values()) / GB
            > 81.3 + 0.15
        )


def test_the_fields_of_a_forecast_are_json() -> None:
    assert json.loads(json.dumps(flash(140 * GB).as_json()))["tokens"] == flash(140 * GB).tokens
