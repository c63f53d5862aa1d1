"""``nvfp4-sgl tiny``."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from typing import Any

from nvfp4_sgl.arguments import add_json, add_output, add_seed, print_json
from nvfp4_sgl.checkpoint.drafts import DraftKind
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.synthetic.tiny_config import TinyDraft, TinyFormat, TinyNames, bundled_draft, tiny_config
from nvfp4_sgl.synthetic.tiny_folder import require_replaceable
from nvfp4_sgl.terminal import Counter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl tiny``."""
    add_output(parser, "where to write; created if absent")
    parser.add_argument(
        "--format",
        choices=[format.value for format in TinyFormat],
        default=TinyFormat.NVFP4_FULL.value,
        help="storage of the matrices (default: %(default)s)",
    )
    parser.add_argument(
        "--names",
        choices=[names.value for names in TinyNames],
        default=TinyNames.ORIGINAL.value,
        help="naming scheme of the tensors (default: %(default)s)",
    )
    parser.add_argument(
        "--draft",
        choices=[draft.value for draft in TinyDraft],
        help="draft to include (default: mtp; none in compressed-tensors)",
    )
    add_seed(parser, "the random weights")
    parser.add_argument("--force", action="store_true", help="replace a tiny checkpoint that is already there")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="FIELD=JSON",
        type=_assignment,
        action="append",
        default=[],
        help="replace a field of config.json, e.g. --set index_topk=512; may be repeated",
    )
    parser.add_argument(
        "--no-check", action="store_true", help="write it only: do not inspect it, nor generate with it on the CPU"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and print what is in it."""
    overrides = dict(args.overrides)
    # All that can be refused is refused before torch is imported, which takes seconds.
    draft = None if args.draft is None else TinyDraft(args.draft)
    raw = tiny_config(TinyFormat(args.format), overrides, TinyNames(args.names), draft)
    ModelConfig.from_dict(raw, source="tiny checkpoint")
    require_replaceable(args.output, args.force)

    from nvfp4_sgl.synthetic import tiny, try_out

    progress = Counter("tensors drawn:")
    try:
        summary = tiny.write_tiny(
            args.output,
            args.format,
            args.seed,
            force=args.force,
            names=args.names,
            draft=args.draft,
            progress=progress,
            **overrides,
        )
    finally:
        progress.end()
    made = {
        "directory": str(args.output),
        "format": args.format,
        "names": args.names,
        "draft": bundled_draft(raw, TinyFormat(args.format)).value,
        "seed": args.seed,
        "bytes": summary.nbytes,
    }
    shown = None if args.no_check else try_out.try_out(args.output, args.seed)
    serve = f"python -m sglang.launch_server --model-path {shlex.quote(str(args.output))}"
    if draft not in (None, TinyDraft.NONE):  # one that was asked for is there to draft
        serve += f" --speculative-algorithm {DraftKind[draft.name].algorithm}"
    if args.json:
        print_json(made | {"check": shown and asdict(shown), "next": serve})
    else:
        print(f"wrote {args.output} ({args.format}, seed {args.seed})\n{summary.table()}")
        if shown is not None:
            print("\n".join(shown.lines()))
        print(f"next: {serve}")
    return 0


def _assignment(text: str) -> tuple[str, Any]:
    field, separator, value = text.partition("=")
    try:
        if separator:
            return field, json.loads(value)
    except json.JSONDecodeError:
        pass
    raise argparse.ArgumentTypeError(f"expected FIELD=JSON, found '{text}'")
