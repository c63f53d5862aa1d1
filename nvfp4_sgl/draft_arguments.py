"""Flags by which a server drafts, by SGLang's names, for commands that prepare one. Imports nothing that takes time."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from nvfp4_sgl.arguments import whole_number
from nvfp4_sgl.cache.layout import DRAFTED_TOKENS
from nvfp4_sgl.checkpoint.drafts import DRAFTS
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.draft_config import MAX_BLOCK
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.serving.drafts import checks
from nvfp4_sgl.sglang_defaults import DRAFT_STEPS


@dataclass(frozen=True)
class DraftFlags:
    """The flags; ``None`` is the default.

    Attributes:
        algorithm, steps, block: ``--speculative-algorithm``, ``--speculative-num-steps``,
            ``--speculative-dspark-block-size``.
    """

    algorithm: str | None = None
    steps: int | None = None
    block: int | None = None

    def given(self, verified: Verified) -> dict[str, Any]:
        """A server's flags, as :mod:`.checks` takes them."""
        left_out = ("draft_model_path", "eagle_topk", "num_draft_tokens")
        return {f"speculative_{name}": None for name in left_out} | {
            "speculative_algorithm": self.algorithm,
            "speculative_num_steps": self.steps,
            "speculative_dspark_block_size": self.block,
            "model_path": verified.inventory.directory,
        }

    def round_tokens(self, verified: Verified, target: str, mode: ActivationMode) -> int:
        """Tokens that such a server's rounds verify; 0 if it drafts nothing.

        Args:
            mode: ``activation_mode``.

        Raises:
            CheckpointError, ConfigError, UnsupportedError: the server would refuse the flags, as :mod:`.checks` says.
        """
        given = self.given(verified)
        checks.check_flags(given)
        checks.check_draft(given, verified, target, {"activation_mode": mode.value})
        return int(checks.declared(given, verified).get("speculative_num_draft_tokens", 0))


def add_drafts(parser: Any) -> None:
    """The flags of :class:`DraftFlags`, as ``algorithm``, ``steps`` and ``block``."""
    parser.add_argument(
        "--speculative-algorithm",
        type=str.upper,
        choices=DRAFTS,
        dest="algorithm",
        help="draft with what DIR bundles (default: nothing is drafted)",
    )
    parser.add_argument(
        "--speculative-num-steps",
        type=whole_number(DRAFTED_TOKENS - 1),
        metavar="N",
        dest="steps",
        help=f"guesses of a round, of MTP (default: {DRAFT_STEPS})",
    )
    parser.add_argument(
        "--speculative-dspark-block-size",
        type=whole_number(MAX_BLOCK),
        metavar="N",
        dest="block",
        help="guesses of a round, of DSpark (default: the checkpoint's)",
    )


def from_arguments(args: argparse.Namespace) -> DraftFlags:
    """The flags that :func:`add_drafts` has parsed."""
    return DraftFlags(args.algorithm, args.steps, args.block)
