"""The package disturbs nobody else: with it installed, another architecture is served as SGLang serves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nvfp4_sgl.synthetic.tokenizer import write_tokenizer
from tests.support.server import Server


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with the tiny tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.5,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(path)
    write_tokenizer(path, vocab_size=512, model_max_length=2048)
    return path


@pytest.mark.server
def test_llama(llama: Path, tmp_path: Path) -> None:
    """Served by SGLang's own class and a stock backend, without our defaults; log-probabilities as transformers'."""
    flags = ("--max-total-tokens", "4096", "--dtype", "float32")
    with Server.launch(llama, *flags, log=tmp_path / "log", admin=False) as server:
        server.wait_ready()
        server.command("/flush_cache?timeout=30", {})  # needs no key where SGLang's own rules hold
        assert server.get("/v1/models")["data"][0]["max_model_len"] == 2048
        state = server.get("/server_info")
        assert "nvfp4_sgl" not in state["internal_states"][0]
        assert state["attention_backend"] == "torch_native"
        assert state["chunked_prefill_size"] != 1024 and state["reasoning_parser"] is None
        ids = torch.randint(20, 500, (37,), generator=torch.Generator().manual_seed(5)).tolist()
        answer = server.generate(ids, 8)
    assert "type=LlamaForCausalLM" in server.text()
    produced = answer["output_ids"]
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids + produced])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    assert produced == expected.argmax(-1).tolist()
    served = torch.tensor([value for value, _, _ in answer["meta_info"]["output_token_logprobs"]])
    torch.testing.assert_close(served, expected.max(-1).values, rtol=0, atol=1e-4)
