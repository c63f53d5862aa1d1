"""What launch/check_true_width reads is what it has written; the check itself takes minutes."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from programs.check_true_width import CACHED, CAPACITY, LAYER, MODELS, caches_of, one_layer


@pytest.mark.parametrize("model", MODELS)
def test_every_slot_holds_a_valid_entry(model: str) -> None:
    caches = caches_of(one_layer(MODELS[model]), CACHED[model])
    layer, slots = caches.layers[LAYER], caches.slots[0]
    assert len(slots) == CAPACITY > CACHED[model]
    assert layer.compressed is not None and layer.index is not None
    for store, rows in (
        (layer.swa, caches.full_to_swa[slots]),
        (layer.compressed, slots // 4),
        (layer.index, slots // 4),
    ):
        spread = store.read(rows).float().std(dim=-1)
        assert bool(torch.isfinite(spread).all()) and 0.5 < float(spread.min()) <= float(spread.max()) < 2
