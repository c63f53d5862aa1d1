"""The kind of a pass is SGLang's forward mode, by a closed table; sizes do not tell it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import PassKind
from nvfp4_sgl.serving.backend import KINDS, pass_request


def test_the_table_is_closed() -> None:
    assert [*KINDS] == ["EXTEND", "DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"]


def forward_batch(mode: ForwardMode) -> Any:
    """Two requests with one new token each."""
    ends = torch.tensor([7, 300])
    return SimpleNamespace(
        forward_mode=mode,
        positions=ends - 1,
        req_pool_indices=torch.tensor([1, 2]),
        seq_lens=ends,
        seq_lens_cpu=ends,
        extend_seq_lens=torch.ones(2, dtype=torch.int32),
    )


def test_a_prompt_of_one_token_each_is_no_decode_pass() -> None:
    extend, decode = (pass_request(forward_batch(mode)) for mode in (ForwardMode.EXTEND, ForwardMode.DECODE))
    assert (extend.kind, extend.longest, decode.kind, decode.longest) == (PassKind.EXTEND, 300, PassKind.DECODE, None)
    assert extend.added is not None and decode.added is None


@pytest.mark.parametrize("mode", [mode for mode in ForwardMode if mode.name not in KINDS], ids=lambda mode: mode.name)
def test_other_modes_are_refused(mode: ForwardMode) -> None:
    with pytest.raises(UnsupportedError, match=f"forward mode {mode.name}: expected one of EXTEND, DECODE"):
        pass_request(forward_batch(mode))
