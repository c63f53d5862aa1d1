"""Put on PYTHONPATH to break an import in chosen processes of a server.

``BROKEN_IMPORT`` names the module; ``BROKEN_IN`` the processes: ``launcher``, ``scheduler``, ``detokenizer``.
"""

import os
import sys


class _Breaker:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("BROKEN_IMPORT") and _process() == os.environ["BROKEN_IN"]:
            raise ImportError(f"{name} is broken on purpose")
        return None


def _process():
    if "--multiprocessing-fork" not in sys.orig_argv:
        return "launcher"
    # Only the scheduler's process imports it; SGLang loads plugins after that.
    return "scheduler" if "sglang.srt.managers.scheduler" in sys.modules else "detokenizer"


sys.meta_path.insert(0, _Breaker())
