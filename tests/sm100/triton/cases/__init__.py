"""The cases of all families; importing this registers them. See ``case``."""

from tests.sm100.triton.cases import attention, experts, hyper_connection, indexer, inputs, logits, rows
from tests.sm100.triton.cases.case import CASES

__all__ = ["CASES", "attention", "experts", "hyper_connection", "indexer", "inputs", "logits", "rows"]
