"""A server on SM100's boundaries that launches nothing of ours, and what must hold of its way to the first launch.

Both launchers are replaced in the scheduler's process: CuTeDSL's by one that checks and packs the arguments of a call,
Triton's by one that binds them to the kernel's parameters. Neither compiles or writes anything. The process tells, as
events in its log, what it loaded, what the warm-up went through, and what a request launches first.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from nvfp4_sgl.build import Gpu, Serving, needed
from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.names import Role, tensor_specs
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.plan import plan_gemm, token_tile_for
from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.warm_up import keys_for
from nvfp4_sgl.formats.scale_layout import swizzle_128x4
from nvfp4_sgl.targets.fused.warm_up import sizes
from nvfp4_sgl.triton_kernels.common import chip
from nvfp4_sgl.weights.gemms import distinct_gemms
from tests.support.dry_launches import Launch, explained, launch_of
from tests.support.reference_gemms import DryLauncher
from tests.support.server import Server
from tests.support.server_events import tell, tell_freeze, told, told_once

PATCHES = Path(__file__).parent / "sm100_on_hopper"
WIDE = ("torch.bfloat16", "torch.float32")
OUTSIDE = ("embed.weight", "head.weight")
"""Tensors outside of the decoder's layers."""
KERNELS = "nvfp4_sgl.triton_kernels."
"""Modules whose Triton kernels are not launched; SGLang's own are."""

# --- in the server's process ------------------------------------------------------------------------------------


class Launches:
    """Tells what the warm-up ran, which launch of a request comes first, and any that the warm-up lacks."""

    def __init__(self) -> None:
        self.gemms = DryLauncher()
        self.warm: set[Launch] = set()
        self.passes: set[int] = set()
        self._tokens = 0
        self._before: list[str] | None = None
        """Triton kernels of a request's pass before its first GEMM; ``None`` outside such a pass."""
        tell_freeze(self.gemms)

    def plan(self, tokens: int) -> None:
        """An eager pass of so many tokens begins."""
        if self.gemms.ready is None:
            self.passes.add(tokens)
        else:
            self._before, self._tokens = [], tokens

    def triton(self, launch: Launch) -> None:
        if self.gemms.ready is None:
            self.warm.add(launch)
        elif launch not in self.warm:
            tell("not warmed up", variant=explained(launch, self.warm))
        if self._before is not None:
            self._before.append(launch.name)

    def gemm(self, key: KernelKey, call: Call) -> None:
        if self._before is not None:
            tell("first launch", key=key.name, tokens=self._tokens, rows=call.rows, kernels_before=self._before)
            self._before = None


def install(model: Any) -> None:
    """Replace both launchers of this process; ``model`` is the module of the served class."""
    from nvfp4_sgl.targets.fused.gemm_planner import GemmPlanner

    launches = Launches()
    _wrap(launches.gemms, "launch", lambda key, call, clusters: launches.gemm(key, call))
    launcher.install(launches.gemms)
    run = JITFunction.run

    def dry(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith(KERNELS):
            return launches.triton(launch_of(self, args, kwargs))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = dry
    _wrap(GemmPlanner, "plan", lambda planner, request: launches.plan(len(request.positions)))

    warm_up = GemmPlanner.warm_up

    def warm_up_and_tell(*args: Any, **kwargs: Any) -> None:
        warm_up(*args, **kwargs)
        tell("warmed up", passes=sorted(launches.passes), variants=sorted(map(digest, launches.warm)))

    GemmPlanner.warm_up = warm_up_and_tell  # type: ignore[method-assign]
    load = model.DeepseekV4ForCausalLM.load_weights

    def load_and_tell(self: Any, weights: Any) -> Any:
        loaded = load(self, weights)
        tell("loaded", parameters={name: described(value) for name, value in self.decoder.named_parameters()})
        return loaded

    model.DeepseekV4ForCausalLM.load_weights = load_and_tell


def digest(launch: Launch) -> str:
    """A short name for a launch that processes agree on."""
    return f"{launch.name} {hashlib.sha256(str(launch.variant).encode()).hexdigest()[:16]}"


def _wrap(owner: Any, name: str, before: Any) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def described(value: Tensor) -> dict[str, Any]:
    """Type, number of elements and SHA-256 of the bytes of a tensor."""
    data = value.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return {"dtype": str(value.dtype), "elements": value.numel(), "digest": hashlib.sha256(data).hexdigest()}


# --- in the test ------------------------------------------------------------------------------------------------


def check_target(server: Server) -> None:
    """Pre-flight, log and ``/server_info`` say SM100 and ``w4a4``."""
    info = server.info()
    assert (info["target"], info["activation_mode"], info["dtype"]) == ("sm_100a", "w4a4", "bfloat16")
    assert info["boundaries"]["experts"].endswith("experts:Experts (sm100)") and "584-byte" in info["kv_rows"]
    log = server.text()
    assert re.search(r"nvfp4_sgl: scheduler: target sm_100a, w4a4, bfloat16, packed 584-byte entries", log)


def check_weights(server: Server, checkpoint: Path) -> None:
    """Every NVFP4 matrix lies there once, packed; codes and swizzled scales of one are the checkpoint's."""
    parameters = told_once(server.text(), "loaded")["parameters"]
    specs = tensor_specs(ModelConfig.from_dir(checkpoint))
    matrices = [spec.shape for spec in specs.values() if spec.role in (Role.LINEAR, Role.EXPERT_LINEAR)]
    packed = sum(rows * k // 2 for rows, k in matrices)
    codes = {name: value for name, value in parameters.items() if name.endswith(".codes")}
    assert sum(value["elements"] for value in codes.values()) == packed
    assert {value["dtype"] for value in codes.values()} == {"torch.uint8"}
    # All that is wide is wide in the checkpoint, too: a dequantised copy of any matrix would be more. mHC's matrices
    # are three of bf16 for one of fp32; alphas, made of global scales, are left out.
    wide = {name: value["elements"] for name, value in parameters.items() if value["dtype"] in WIDE}
    kept = [
        math.prod(spec.shape) * (3 if name.endswith("_fn") else 1)
        for name, spec in specs.items()
        if spec.role in (Role.PLAIN, Role.FP32) and name not in OUTSIDE
    ]
    alphas = {name.replace(".codes", ".scale") for name in codes}
    assert sum(count for name, count in wide.items() if name not in alphas) == sum(kept)
    inventory = Inventory.open(checkpoint)
    inventory.verify(ModelConfig.from_dir(checkpoint))
    reader = CheckpointReader(inventory)
    stem, (name,) = "layers.0.attn.wo_b", [n for n in codes if n.startswith("layers.0.attn") and "wo_b" in n]
    weight, scales = reader.read(f"{stem}.weight"), reader.read(f"{stem}.weight_scale")
    assert codes[name]["digest"] == described(weight)["digest"]
    swizzled = parameters[name.replace(".codes", ".block_scales")]
    assert swizzled["digest"] == described(swizzle_128x4(scales.view(torch.uint8)))["digest"]
    assert swizzled["digest"] != described(scales)["digest"]


def check_warm_up(server: Server, checkpoint: Path, largest: int) -> None:
    """Every GEMM of up to ``largest`` tokens ran, and passes of each size, before anything was served."""
    config = ModelConfig.from_dir(checkpoint)
    keys = keys_for(distinct_gemms(config), largest, config.swiglu_limit, "sm_100a", B200_CLUSTERS)
    frozen, warmed = (told_once(server.text(), event) for event in ("frozen", "warmed up"))
    assert {key.name for key in keys} == set(frozen["gemms"])
    assert set(sizes(largest)) <= set(warmed["passes"])
    assert len(warmed["variants"]) > 50


def check_foreseen(server: Server, checkpoint: Path, setting: Serving) -> None:
    """``nvfp4-sgl build`` compiles what the warm-up launched, neither more nor less, whatever SGLang's pools are."""
    gpu = Gpu(100, chip.processors(torch.device("cuda" if torch.cuda.is_available() else "cpu")), B200_CLUSTERS)
    foreseen: dict[str, Launch] = {}

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = launch_of(kernel, args, kwargs)
        foreseen[digest(launch)] = launch

    with mock.patch.object(JITFunction, "run", note):
        needed(verify(checkpoint), "sm_100a", setting, gpu)
    launched = set(told_once(server.text(), "warmed up")["variants"])
    idle = [launch for name, launch in foreseen.items() if name not in launched]
    assert not idle, f"{len(idle)} compiled and not launched: {idle[0]}"
    assert not launched - foreseen.keys(), f"launched and not compiled: {sorted(launched - foreseen.keys())}"


def first_key(checkpoint: Path, tokens: int) -> str:
    """The kernel that the plan gives the first GEMM of a prompt."""
    config = ModelConfig.from_dir(checkpoint)
    product = distinct_gemms(config)[0]
    shape = plan_gemm(product.features, product.k, tokens, 1, token_tile_for(tokens), product.output, B200_CLUSTERS)
    return KernelKey("sm_100a", shape).name


def check_first_launches(server: Server, checkpoint: Path, prompts: Sequence[int]) -> None:
    """Prompts of these lengths are answered; each begins with the kernel of its plan, and nothing is compiled."""
    assert len({first_key(checkpoint, length) for length in prompts}) > 1, "prompts that differ in no kernel"
    for length in prompts:
        seen = len(told(server.text(), "first launch"))
        prompt = [7 + n % 500 for n in range(length)]
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
        answer = server.post("/generate", body)
        assert answer["meta_info"]["completion_tokens"] == 2
        launches = [each for each in told(server.text(), "first launch")[seen:] if each["tokens"] == length]
        assert len(launches) == 1, f"expected one pass of {length} tokens, found {launches}"
        (launch,) = launches
        assert launch["rows"] == length and launch["key"] == first_key(checkpoint, length)
        assert launch["kernels_before"], "no kernel of ours before the first GEMM"
    compiled_late = told(server.text(), "not warmed up")
    assert not compiled_late, compiled_late[0]["variant"]
