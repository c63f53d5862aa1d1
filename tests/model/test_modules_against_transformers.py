"""Every module of the decoder against transformers' DeepSeek-V4, at Flash and Pro widths, in fp32.

transformers' implementation shares no code with ours. Expert counts are cut to what fits in memory; every other
dimension is the released model's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.model.attention import Attention
from nvfp4_sgl.model.contract import Activation, Context, PassKind, PassRequest, Slots
from nvfp4_sgl.model.moe import MoE
from nvfp4_sgl.ops import hyper_connection, rope
from nvfp4_sgl.targets import reference
from nvfp4_sgl.weights.parallel import TensorParallel
from tests.support.memory_reader import MemoryReader, original_names, randomise
from tests.support.released import FLASH, PRO, config_json

WIDTHS = {"flash": FLASH, "pro": PRO}
EXPERTS = 8


def of_pro(*values: Any) -> list[Any]:
    """Cases of Pro, 20 s and more each, that do with wider matrices what those of Flash do; attention keeps one."""
    return [pytest.param("pro", value, marks=pytest.mark.full) for value in values]


def build(name: str, ratios: list[int], **overrides: object) -> tuple[ModelConfig, DeepseekV4Config]:
    """Both libraries' configuration of a released model with these layers."""
    raw = config_json(WIDTHS[name], num_hidden_layers=len(ratios), compress_ratios=[*ratios, 0], **overrides)
    theirs = DeepseekV4Config(**{k: v for k, v in raw.items() if k != "architectures"})
    theirs._attn_implementation = "eager"
    return ModelConfig.from_dict(raw), theirs


def max_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    assert torch.isfinite(ours).all()
    return (ours - theirs).abs().max().item()


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", WIDTHS)
def test_rope_tables(name):
    config, theirs = build(name, [0, 4])
    table = hf.DeepseekV4RotaryEmbedding(theirs)
    main = rope.inverse_frequencies(64, config.rope_theta)
    compressed = rope.inverse_frequencies(64, config.compress_rope_theta, config.yarn)
    assert max_error(main, table.main_inv_freq) <= 2e-8
    assert max_error(compressed, table.compress_inv_freq) <= 2e-8
    ratio = compressed / rope.inverse_frequencies(64, config.compress_rope_theta)
    expected = torch.tensor([1.0] * 16 + [1 - 0.9375 * (i / 10) for i in range(1, 10)] + [0.0625] * 7)
    assert max_error(ratio, expected) <= 1e-6


@pytest.mark.parametrize("name", WIDTHS)
def test_hyper_connection(name):
    config, theirs = build(name, [0])
    module, head = hf.DeepseekV4HyperConnection(theirs), hf.DeepseekV4HyperHead(theirs)
    randomise(module, 1)
    randomise(head, 2)
    streams = torch.randn(37, 4, config.hidden_size, generator=torch.Generator().manual_seed(3))
    streams[5, 2, 17] = 1e4
    post, comb, collapsed = module(streams[None])
    ours, our_post, our_comb = hyper_connection.hyper_connection_pre(
        streams, module.fn, module.base, module.scale, iterations=20, hc_eps=1e-6, norm_eps=1e-6
    )
    # 1e-5 on comb: the only bound that sees Sinkhorn's order, its count of iterations and its eps.
    assert max_error(our_comb, comb[0]) <= 1e-6
    assert max_error(our_post, post[0]) <= 1e-5
    assert ((ours - collapsed[0]).norm() / collapsed.norm()).item() <= 1e-6
    output = torch.randn(37, config.hidden_size, generator=torch.Generator().manual_seed(4))
    expected = post[0].unsqueeze(-1) * output.unsqueeze(-2) + comb[0].transpose(-1, -2) @ streams
    mixed = hyper_connection.hyper_connection_post(output, streams, our_post, our_comb)
    assert ((mixed - expected).norm() / expected.norm()).item() <= 1e-6
    assert max_error(mixed[:5], expected[:5]) <= 1e-5
    collapsed = hyper_connection.hyper_connection_head(
        streams, head.hc_fn, head.hc_base, head.hc_scale, hc_eps=1e-6, norm_eps=1e-6
    )
    assert ((collapsed - head(streams[None])[0]).norm() / collapsed.norm()).item() <= 1e-6


def attend(context: Context, layer: Attention, parts: list[torch.Tensor]) -> torch.Tensor:
    """One sequence in parts, each a pass."""
    caches = LocalCaches(context.config, capacity=512)
    planner = context.boundaries.plan(context, Slots(caches.slots, caches.full_to_swa, 1, 512), caches.layers)
    results = []
    for part in parts:
        (start,), (end,) = caches.advance({0: len(part)})
        request = PassRequest(
            torch.arange(start, end),
            torch.zeros(1).long(),
            torch.tensor([end]),
            PassKind.EXTEND,
            torch.tensor([len(part)]),
        )
        results.append(layer(Activation(part), planner.plan(request), caches.layers[0]))
    return torch.cat(results)


@pytest.mark.parametrize(("name", "ratio"), [("flash", 0), ("flash", 4), ("flash", 128), ("pro", 4), *of_pro(0, 128)])
def test_attention(name, ratio):
    """300 tokens in one go, and the same cut into a prefill, chunks and single steps."""
    tokens = 300
    config, theirs = build(name, [ratio], index_topk=48)
    module = hf.DeepseekV4Attention(theirs, 0)
    randomise(module, 10 + ratio)
    x = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(20))
    positions = torch.arange(tokens)[None]
    table = hf.DeepseekV4RotaryEmbedding(theirs)
    embeddings = {kind: table(x, position_ids=positions, layer_type=kind) for kind in ("main", "compress")}
    distance = positions.T - positions
    mask = torch.zeros(tokens, tokens).masked_fill((distance < 0) | (distance >= 128), float("-inf"))
    expected, _ = module(x[None], embeddings, positions, mask[None, None])

    reader = MemoryReader(original_names(module, "layers.0.attn"))
    del module
    context = Context(reader, config, reference.boundaries())
    ours = Attention(context, config.layer(0))
    assert config.kind(0) is LayerKind(ratio)
    for chunks in ([tokens], [131, 1, 1, 2, 120, 1, 3, 41]):
        result = attend(context, ours, list(x.split(chunks)))
        assert max_error(result, expected[0]) <= 3e-5 * expected.abs().max().item()


@pytest.mark.parametrize(("name", "hashed"), [("flash", True), ("flash", False), *of_pro(True, False)])
def test_moe(name, hashed):
    config, theirs = build(name, [0], n_routed_experts=EXPERTS, num_hash_layers=int(hashed), vocab_size=512)
    module = hf.DeepseekV4SparseMoeBlock(theirs, 0)
    assert module.is_hash == hashed
    randomise(module, 30)
    for weight in (
        module.experts.gate_up_proj,
        module.shared_experts.gate_proj.weight,
        module.shared_experts.up_proj.weight,
    ):
        weight.mul_(6.0)  # so that the clamp at 10 acts
    x = torch.randn(33, config.hidden_size, generator=torch.Generator().manual_seed(31))
    ids = torch.randint(0, 512, (33,), generator=torch.Generator().manual_seed(32))
    if hashed:
        orders = torch.rand(512, EXPERTS, generator=torch.Generator().manual_seed(33)).argsort(-1)
        module.gate.tid2eid.copy_(orders[:, :6])
    expected = module(x[None], ids[None])[0]
    reader = MemoryReader(original_names(module, "layers.0.ffn"))
    del module
    ours = MoE(Context(reader, config, reference.boundaries()), config.layer(0))
    assert max_error(ours(Activation(x), ids, None), expected) <= 1e-5 * expected.abs().max().item()


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_parts_sum_to_the_whole(size):
    """Ranks' partial sums add up to the unsplit result, attention (CSA) and experts alike."""
    config, theirs = build("flash", [4], n_routed_experts=EXPERTS, num_hash_layers=0, hidden_size=512, index_topk=16)
    attention, moe = hf.DeepseekV4Attention(theirs, 0), hf.DeepseekV4SparseMoeBlock(theirs, 0)
    randomise(attention, 40)
    randomise(moe, 41)
    reader = MemoryReader(original_names(attention, "layers.0.attn") | original_names(moe, "layers.0.ffn"))
    x = torch.randn(90, 512, generator=torch.Generator().manual_seed(42))
    ids = torch.zeros(90, dtype=torch.int64)

    def run(parallel: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
        context = Context(reader, config, reference.boundaries(), parallel=parallel)
        return attend(context, Attention(context, config.layer(0)), [x]), MoE(context, config.layer(0))(
            Activation(x), ids, None
        )

    whole = run(TensorParallel())
    parts = [run(replace(TensorParallel(), rank=rank, size=size)) for rank in range(size)]
    for index in range(2):
        total = torch.stack([part[index] for part in parts]).sum(0)
        assert max_error(total, whole[index]) <= 1e-4
