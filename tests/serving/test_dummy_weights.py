"""``--load-format dummy``: a server from config.json and a tokenizer alone, and what it is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_sgl.serving import arguments, trace
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config
from nvfp4_sgl.synthetic.tokenizer import write_tokenizer
from nvfp4_sgl.tracing.diff import differences
from nvfp4_sgl.tracing.reading import read_record
from tests.support.full import full
from tests.support.server import Server, wait_for_none
from tests.support.start_ups import StartUps

pytestmark = [pytest.mark.server]

DUMMY = ("--load-format", "dummy")
LAYERS = '{"num_hidden_layers": 4}'
PROMPT = [317, 24, 333, 28, 135, 269, 139, 181] * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json and a tokenizer."""
    folder = tmp_path_factory.mktemp("dummy")
    config = tiny_config(TinyFormat.NVFP4_FULL, {})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"], config["max_position_embeddings"])
    return folder


def answer(server: Server) -> tuple[list[int], list[float]]:
    """Ids of the prompt but its first and of 8 more, greedy, and their log-probabilities."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0, "sampling_params": sampling}
    meta = server.post("/generate", body)["meta_info"]
    tokens = [
        entry for entry in (*meta["input_token_logprobs"], *meta["output_token_logprobs"]) if entry[0] is not None
    ]
    return [entry[1] for entry in tokens], [float(entry[0]) for entry in tokens]


@pytest.mark.parametrize("ranks", [2, *full(1)])
def test_a_server(ranks: int, model: Path, tmp_path: Path) -> None:
    """Log-probabilities are finite, and those of the model with no server around it, whatever the start and the ranks.

    A chat is answered, and log and ``/server_info`` say what weights and routing are. What is recorded of the first
    passes is the same on all ranks where they compute the same. Asked to end, it leaves no process behind.
    """
    flags = (*DUMMY, "--tp-size", str(ranks), "--json-model-override-args", LAYERS)
    log, records = tmp_path / "server.log", tmp_path / "records"
    late = {arguments.UNIFORM_EXPERTS: "1", trace.TRACE: str(records), trace.TRACE_PASSES: "6"}
    with Server.launch(model, *flags, log=log, late=late) as server:
        server.wait_ready()
        chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        assert server.post("/v1/chat/completions", chat)["usage"]["completion_tokens"] > 0
        ids, logprobs = answer(server)
        info: dict[str, Any] = server.info()
        assert info["weights"].startswith("RANDOM (nvfp4-full") and "no model" in info["weights"]
        assert "SIMULATED" in info["routing"] and arguments.UNIFORM_EXPERTS in info["routing"]
        assert "nvfp4_sgl: weights: RANDOM" in server.text()
        memory = info["memory"]
        assert memory["setting"]["ranks"] == ranks and memory["setting"]["row_bytes"] == 4
        assert memory["tokens"] == info["pools"]["full"]["capacity"] == 16384
        assert "nvfp4_sgl: memory: weights" in server.text()
        server.ask_to_end()
        assert server.process.wait(60) == 0 and not wait_for_none(server.process.pid, 10)
    assert len(ids) == len(PROMPT) + 7 and all(math.isfinite(value) for value in logprobs)
    dummy = verify_dummy(model, {"num_hidden_layers": 4})
    alone = Standalone(dummy, requests=1, capacity=512, uniform_experts=True)
    # Passes as the server's: simulated routing goes by a token's place in its pass.
    passes = [PROMPT, *([token] for token in ids[len(PROMPT) - 1 : -1])]
    rows = torch.cat([alone.extend({0: tokens})[0] for tokens in passes]).log_softmax(-1)
    expected = [float(rows[place, token]) for place, token in enumerate(ids)]
    assert logprobs == pytest.approx(expected, abs=1e-4)
    assert ids[len(PROMPT) - 1 :] == rows[len(PROMPT) - 1 :].argmax(-1).tolist()
    files = [records / f"rank{rank}.jsonl" for rank in range(ranks)]
    assert sorted(records.iterdir()) == files
    for file in files:
        head, *passes_recorded = map(json.loads, file.read_text().splitlines())
        assert head["ranks"] == ranks and head["target"] == "cpu" and len(passes_recorded) == 6
        assert not any(op["nan"] or op["inf"] for each in passes_recorded for op in each["ops"])
    replicated = ("hc_attn.x", "hc_ffn.x", "hc_ffn.streams", "prepare.q_lora", "ffn.route", "hc_head.x")
    found = [
        each for each in differences(read_record(files[0]), read_record(files[-1])) if each.name.endswith(replicated)
    ]
    assert len(found) > 6 * 4 * 4 and all(each.equal for each in found)


def test_too_little_memory_ends_the_server_before_it_loads(model: Path, tmp_path: Path) -> None:
    """With the arithmetic and the flag to change, and no traceback."""
    log = tmp_path / "server.log"
    with Server.launch(model, *DUMMY, "--mem-fraction-static", "0.0001", log=log) as server:
        assert server.wait_exit() != 0
        output = server.text()
    (message,) = [line for line in output.splitlines() if "nvfp4-sgl: error: too little memory" in line]
    assert "--mem-fraction-static 0.0001 of" in message and "raise --mem-fraction-static above" in message
    for part in ("weights   ", "ratio-128 states", "free   "):
        assert part in output[output.index("nvfp4-sgl: error:") :]
    assert "Traceback" not in output


REFUSED = {
    "more layers": (("--json-model-override-args", '{"num_hidden_layers": 9}'), ("num_hidden_layers 9", "5 layers")),
    "the tokenizer's field": (("--json-model-override-args", '{"vocab_size": 9}'), ("vocab_size", "num_hidden_layers")),
    "ranks": (("--json-model-override-args", '{"o_groups": 1}', "--tp-size", "2"), ("--tp-size 2", "o_groups")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, model: Path, start_up: StartUps) -> None:
    flags, expected = REFUSED[case]
    code, output = start_up(model, *DUMMY, *flags)
    assert code not in (0, None) and "Traceback" not in output, output
    (message,) = [line for line in output.splitlines() if "nvfp4-sgl: error:" in line]
    for text in expected:
        assert text in message


def test_without_dummy_weights_sizes_are_the_checkpoint_s(
    tiny_checkpoints: Callable[[str], Path], start_up: StartUps
) -> None:
    flags = ("--json-model-override-args", LAYERS)
    code, output = start_up(tiny_checkpoints("nvfp4-full"), *flags)
    assert code not in (0, None) and "num_hidden_layers" in output and "--load-format dummy" in output


def test_config_alone_is_no_checkpoint(model: Path, start_up: StartUps) -> None:
    code, output = start_up(model)
    assert code not in (0, None) and "no *.safetensors file" in output and "--load-format dummy" in output


def test_round_robin_routing_is_refused(model: Path, start_up: StartUps) -> None:
    code, output = start_up(model, *DUMMY, environment={arguments.ROUND_ROBIN: "1"})
    assert code not in (0, None) and f"{arguments.ROUND_ROBIN}: not implemented" in output
