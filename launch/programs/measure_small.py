"""Say what each storage costs the small model: behind launch/measure_small."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/measure_small", description="Figures of the small model.")
    parser.add_argument("checkpoint", type=Path, help="the BF16 checkpoint that launch/train_small wrote")
    parser.add_argument("--acceptance", action="store_true", help="instead: which guesses of its draft are accepted")
    parser.add_argument("--documents", type=int, default=32, help="documents to measure on (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report here, too")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: %(default)s)")
    args = parser.parse_args()
    from nvfp4_sgl.config import require_checkpoint

    require_checkpoint(args.checkpoint)
    # Behind the parser: it takes seconds, which --help need not wait for.
    import torch
    from small_model.acceptance import acceptance
    from small_model.figures import report
    from small_model.measure import far_documents

    torch.set_num_threads(args.threads)
    lines = []
    found = report(args.checkpoint, args.documents)
    if args.acceptance:
        found = acceptance(args.checkpoint, far_documents(args.documents))
    for line in found:
        print(line, flush=True)
        lines.append(line)
    if args.output:
        args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
