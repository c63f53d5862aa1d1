"""On PYTHONPATH of a stock SGLang server: its dummy FP4 codes become random bytes.

SGLang fills float parameters at random and leaves integer ones as they were allocated, mostly zero; GEMMs of zeros run
faster (894 against 788 TFLOP/s of bf16 on an H200).
"""

import builtins
import sys
from typing import Any

LOADER = "sglang.srt.model_loader.weight_utils"
_import = builtins.__import__


def _watch(name: str, *args: Any, **kwargs: Any) -> Any:
    imported = _import(name, *args, **kwargs)
    loader = sys.modules.get(LOADER)
    if loader is not None and hasattr(loader, "initialize_dummy_weights"):
        builtins.__import__ = _import
        _randomise_codes(loader)
    return imported


def _randomise_codes(loader: Any) -> None:
    fill = loader.initialize_dummy_weights

    def initialize_dummy_weights(model: Any, *args: Any, **kwargs: Any) -> None:
        fill(model, *args, **kwargs)
        for parameter in model.state_dict().values():
            if parameter.dtype == loader.torch.uint8:
                parameter.random_(0, 256)
            elif parameter.dtype == loader.torch.int8:
                parameter.random_(-128, 128)

    loader.initialize_dummy_weights = initialize_dummy_weights


builtins.__import__ = _watch
