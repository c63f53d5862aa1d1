"""The platform of hosts without an accelerator, for any model that SGLang serves there.

Imported by SGLang while it is itself being imported; import ``sglang`` first.
"""

from __future__ import annotations

from typing import Any

from nvfp4_sgl.serving import arguments
from nvfp4_sgl.serving.drafts import chain
from nvfp4_sgl.serving.sglang import settings
from nvfp4_sgl.serving.sglang.ledger import find
from nvfp4_sgl.sglang_defaults import CPU_DEFAULTS


class CpuReferencePlatform(find("CpuDeviceMixin"), find("SRTPlatform")):  # type: ignore[misc]
    """CPU without Triton, graphs or SGLang's compiled CPU kernels."""

    _enum = find("PlatformEnum").OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = find("PlatformCapabilities")()

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"  # argument resolution wants the name, not SGLang's own torch.device

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        """For architectures other than ours."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """For our architecture alone: drafts of others need kernels."""
        return algorithm in ("EAGLE", "DSPARK") and arguments.serves_ours()

    def get_speculative_cache_locs_fn(self) -> Any:
        return chain.cache_locs

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Called by SGLang during argument resolution; ``server_args`` records what is assigned."""
        if arguments.is_our_checkpoint(server_args.model_path):
            for name, value in CPU_DEFAULTS.items():
                found = getattr(server_args, name)
                if found is None or found is False or found == "auto":
                    setattr(server_args, name, value)
        elif settings.given_arguments(server_args)["attention_backend"] is None:
            # SGLang has chosen intel_amx, as for any x86 CPU; the published wheel lacks its kernels.
            server_args.attention_backend = self.get_default_attention_backend()
