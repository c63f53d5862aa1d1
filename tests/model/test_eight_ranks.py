"""Eight ranks that exchange over gloo, against one, in a tiny model with Pro's layers, groups and heads a rank.

Ranks are threads of this process, each with a process group of its own: real collectives, and no servers to wait for.
Both models compute in fp32, so that ranks differ from one by the order of a sum alone. With ``--full`` a server of
eight processes is asked, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.weights.parallel import Collective, SequenceParallel, TensorParallel
from tests.support.released import PRO
from tests.support.server import Server

RANKS = 8
LAYERS = 5
"""Pro's first: HCA, HCA, CSA, HCA, CSA. As in Pro the first three are routed by token ids."""
SHAPES: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "compress_ratios": PRO["compress_ratios"][:LAYERS],
    "num_hash_layers": PRO["num_hash_layers"],
    "num_attention_heads": 2 * RANKS,
    "o_groups": PRO["o_groups"],
    "o_lora_rank": 16,
    "moe_intermediate_size": 16 * RANKS,
    "n_routed_experts": 12,
    "routed_scaling_factor": PRO["routed_scaling_factor"],
}
"""Two o-groups a rank, as in Pro. A rank's part of an expert is as small as a block scale allows."""
TOLERANCE = 1e-4
SECONDS = 60
DIVIDED = 64
"""Tokens from which a pass is divided over the ranks, here."""
PASSES = (250, 1, 3, 1)
"""Tokens of a prompt that closes windows of both ratios and is divided, and of what follows."""
SHORT = (30, 1)
"""The same where a mistake must be seen."""


class Gloo:
    """One of the ranks: a process group of its own, and what went through it."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=SECONDS))
        self.rank, self.calls = rank, 0

    def all_reduce(self, collective: Collective, part: Tensor) -> Tensor:
        found = part.contiguous().clone()
        self._group.allreduce([found]).wait()
        self.calls += 1
        return found

    def reduce_scatter(self, collective: Collective, part: Tensor) -> Tensor:
        return self.all_reduce(collective, part).unflatten(0, (RANKS, -1))[self.rank].clone()

    def all_gather(self, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(RANKS)]
        self._group.allgather([parts], [own.contiguous()]).wait()
        self.calls += 1
        return torch.cat(parts)

    @property
    def parallel(self) -> TensorParallel:
        sequence = SequenceParallel(self.reduce_scatter, self.all_gather, DIVIDED)
        return TensorParallel(self.rank, RANKS, self.all_reduce, sequence)


@pytest.fixture(scope="module", autouse=True)
def one_thread_each() -> Iterator[None]:
    """Eight ranks share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pro")
    write_tiny(path, "nvfp4-full", seed=8, draft="none", **SHAPES)
    return path


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Standalone:
    return Standalone(checkpoint, requests=1, capacity=256)


def together(work: Callable[[Gloo], Tensor]) -> list[Tensor]:
    """``work`` of all ranks at once, in a thread each; the groups meet by a store in memory."""
    store = dist.HashStore()

    def of_rank(rank: int) -> Tensor:
        with torch.no_grad():
            return work(Gloo(store, rank))

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(of_rank, range(RANKS)))


def log_probabilities(model: Standalone, counts: Sequence[int] = PASSES) -> Tensor:
    """fp32 [tokens of all passes, vocabulary]."""
    model.reset()
    generator = torch.Generator().manual_seed(3)
    passes = [torch.randint(3, 500, (count,), generator=generator).tolist() for count in counts]
    return torch.cat([model.extend({0: ids})[0] for ids in passes]).log_softmax(-1)


def test_the_model_is_of_pro_s_kind(alone: Standalone) -> None:
    config, pro = alone.config, ModelConfig.from_dict(PRO)
    assert config.layer_kinds == pro.layer_kinds[:LAYERS] and {*config.layer_kinds} == {LayerKind.CSA, LayerKind.HCA}
    assert [config.is_hash_routed(layer) for layer in range(LAYERS)] == [True, True, True, False, False]
    assert config.o_groups == pro.o_groups and config.num_attention_heads % RANKS == 0


def test_eight_ranks_agree_with_one(alone: Standalone, checkpoint: Path) -> None:
    with torch.no_grad():
        expected = log_probabilities(alone)
    assert float(expected.max(-1).values.exp().median()) > 0.3, "a distribution that is flat hides everything"
    calls: dict[int, int] = {}

    def work(rank: Gloo) -> Tensor:
        found = log_probabilities(Standalone(checkpoint, requests=1, capacity=256, parallel=rank.parallel))
        calls[rank.rank] = rank.calls
        return found

    found = together(work)
    for each in found:
        assert float((each - expected).abs().max()) <= TOLERANCE
    assert len({*calls.values()}) == 1 and calls[0] > 2 * LAYERS * len(PASSES), "the long prompt was not divided"


@pytest.mark.parametrize("lost", [Collective.ATTENTION_OUTPUT, Collective.EXPERT_OUTPUT], ids=lambda one: one.name)
def test_a_share_that_is_lost_is_seen(lost: Collective, alone: Standalone, checkpoint: Path) -> None:
    """The last rank adds nothing at one kind of sum."""
    with torch.no_grad():
        expected = log_probabilities(alone, SHORT)

    def work(rank: Gloo) -> Tensor:
        def without(collective: Collective, part: Tensor) -> Tensor:
            is_lost = collective is lost and rank.rank == RANKS - 1
            return rank.all_reduce(collective, torch.zeros_like(part) if is_lost else part)

        parallel = replace(rank.parallel, all_reduce=without, sequence=None)
        return log_probabilities(Standalone(checkpoint, requests=1, capacity=256, parallel=parallel), SHORT)

    assert all(float((each - expected).abs().max()) > 100 * TOLERANCE for each in together(work))


@pytest.mark.server
@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_server_of_eight_processes(alone: Standalone, checkpoint: Path, tmp_path: Path) -> None:
    """SGLang's own eight ranks on gloo, about 10 GB together: log-probabilities of a prompt and its answer."""
    prompt = torch.randint(3, 500, (150,), generator=torch.Generator().manual_seed(4)).tolist()
    flags = ("--tp-size", str(RANKS), "--max-total-tokens", "4096", "--max-running-requests", "4")
    with Server.launch(checkpoint, *flags, log=tmp_path / "log") as server:
        server.wait_ready(1000)
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        answer = server.post("/generate", body)
    ids = [*prompt, *answer["output_ids"]]
    alone.reset()
    with torch.no_grad():
        logits = alone.extend({0: ids})[0].log_softmax(-1)
    given = answer["meta_info"]["input_token_logprobs"][1:] + answer["meta_info"]["output_token_logprobs"]
    expected = logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert len(given) == len(expected)
    assert float((torch.tensor([value for value, *_ in given]) - expected).abs().max()) <= 10 * TOLERANCE
