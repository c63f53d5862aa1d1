"""Put on PYTHONPATH to end a process that imports what takes seconds to import."""

import sys

HEAVY = {"torch", "numpy", "transformers", "sglang", "triton", "cutlass", "safetensors"}


class _Refuser:
    def find_spec(self, name, path=None, target=None):
        if name in HEAVY:
            raise AssertionError(f"{name} is imported")
        return None


sys.meta_path.insert(0, _Refuser())
