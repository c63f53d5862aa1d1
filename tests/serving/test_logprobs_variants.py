"""Log-probabilities of servers with other flags or formats; each starts a server of its own."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from nvfp4_sgl import cli
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Standalone
from tests.support.full import full
from tests.support.logprobs import TOKENS, check, check_concurrently, generate
from tests.support.oracle import cached_hf_model, hf_logits
from tests.support.prompts import clear_ids

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def oracle(checkpoint) -> DeepseekV4ForCausalLM:
    return cached_hf_model(checkpoint)


class Prompts(dict[int, list[int]]):
    """Searched for when first asked for, since each test runs in a process of its own."""

    def __init__(self, oracle: DeepseekV4ForCausalLM):
        self._oracle = oracle

    def __missing__(self, length: int) -> list[int]:
        self[length] = clear_ids(self._oracle, length, seed=length)
        return self[length]


@pytest.fixture(scope="module")
def prompts(oracle) -> Prompts:
    """Prompts whose expert and entry choices are clear of fp32 noise, by length."""
    return Prompts(oracle)


def test_chunked_prefill(serve, checkpoint, oracle, prompts):
    server = serve(checkpoint, "--chunked-prefill-size", "256")
    for length in (131, 1500):
        check(generate(server, prompts[length], logprob_start_len=0), prompts[length], oracle)
    check_concurrently(server, oracle, [(prompts[n], TOKENS) for n in (1500, 513, 129, 128)])


def test_retraction(serve, checkpoint, oracle):
    """A pool too small for what was admitted: requests are evicted mid-way and start again, with the same result."""
    flags = ("--max-total-tokens", "2048", "--swa-full-tokens-ratio", "1", "--schedule-conservativeness", "0.1")
    server = serve(checkpoint, *flags)
    requests = [(clear_ids(oracle, 100 + 7 * i, seed=60 + i), 260) for i in range(6)]
    # SGLang reserves everything for a request that ignores EOS, and would never have to take a page back.
    answers = check_concurrently(server, oracle, requests, ignore_eos=False)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


@pytest.mark.parametrize(
    "name",
    [
        "converted at load",
        *full("deepseek", "nvfp4-experts", "converted"),
    ],
)
def test_other_formats(name, serve, tiny_checkpoints, tmp_path):
    """Files of several kinds, and what converting makes of others, before and while they are loaded;
    ``tests/model/test_whole_model.py`` has all formats, without a server. Last run of what is left out: passed
    (2026-11-25).
    """
    flags: tuple[str, ...] = ()
    path, is_converted = tmp_path / "full", name.startswith("converted")
    if is_converted:
        source = tiny_checkpoints("compressed-tensors" if name == "converted" else "deepseek")
        assert cli.main(["convert", str(source), str(path), "--device", "cpu"]) == 0
    else:
        path = tiny_checkpoints(name)
    model = cached_hf_model(path)
    if name == "converted at load":
        path = source
        flags = ("--json-model-override-args", '{"convert_at_load": "all,drafts"}', "--speculative-algorithm", "EAGLE")
    server = serve(path, *flags)
    if flags:
        expected = f"nvfp4-full made at load of the mxfp4-experts checkpoint {path}"
        assert server.info()["weights"] == expected and server.info()["draft"] == "MTP, 3 steps"
        assert server.text().count("converted at load: shared") == 2  # of the model and of its draft
    for length in (5, 131) if is_converted else (5, 131, 600):  # clear prompts of it are rare
        ids = clear_ids(model, length, seed=length)
        check(generate(server, ids, logprob_start_len=0), ids, model)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("--kv-cache-dtype", "fp8_e4m3"), {"packed": True}),
        (("--json-model-override-args", '{"activation_mode": "w4a4"}'), {"mode": ActivationMode.W4A4}),
        (("--dtype", "bfloat16"), {"dtype": torch.bfloat16}),
    ],
    ids=["packed", "w4a4", "bfloat16"],
)
def test_rounding_modes(arguments, options, serve, checkpoint, oracle, prompts):
    """Modes that round on the way, against the same mode run alone (which is checked against a reference of its own).

    Values that fall on a rounding boundary may land on either side, so most positions agree closely and a few do not;
    every position must be far nearer to its own mode than the mode's effect.
    """
    server = serve(checkpoint, *arguments)
    alone = Standalone(checkpoint, capacity=2048, requests=1, **options)
    for length in (131, 513):
        ids = prompts[length]
        answer = generate(server, ids, logprob_start_len=0)
        values = [value for value, _, _ in answer["meta_info"]["input_token_logprobs"]][1:]
        alone.reset()
        targets = torch.tensor(ids[1:])[:, None]
        same = alone.extend({0: ids})[0].log_softmax(-1)[:-1].gather(1, targets)[:, 0]
        exact = hf_logits(oracle, ids).log_softmax(-1)[:-1].gather(1, targets)[:, 0]
        error, effect = (torch.tensor(values) - same).abs(), (exact - same).abs()
        assert error.mean().item() <= 0.2 * effect.mean().item(), (error.mean(), effect.mean())
        assert error.median().item() <= 0.05 * effect.median().item(), (error.median(), effect.median())
