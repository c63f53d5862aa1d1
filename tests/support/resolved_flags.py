"""Resolves command lines of a server as its launcher does, plugins loaded, and starts nothing.

Reads ``[[argument, …], …]`` as JSON from stdin; the last line of stdout is what each came to: ``null`` if its
arguments were taken, or the class and message of the error.
"""

from __future__ import annotations

import argparse
import json
import sys


def result(argv: list[str]) -> str | None:
    from sglang.srt import server_args
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.arg_groups.overrides import resolution_result

    try:
        arguments = server_args.prepare_server_args(argv)
        arguments.resolve_once()
        arguments.check_server_args()
        for field in record_fields(type(arguments)):
            resolution_result(arguments, field.name)
    except SystemExit as error:
        return f"exit {error.code}"
    except argparse.ArgumentError as error:
        return f"ArgumentError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    import sglang.launch_server  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    print(json.dumps([result(argv) for argv in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
