"""Put on PYTHONPATH, with TRITON_INTERPRET=1, to serve as on a GPU, but with the kernels interpreted on the CPU.

``INTERPRETED_TARGET`` is the target, ``sm_90a`` or ``sm_100a``, whose GEMMs are computed in torch. With
``INTERPRETED_PROMPTS`` prompts of up to so many tokens run as if in a graph of that size. Nothing else of a
server changes: SGLang takes the machine for one without a GPU, so pools and batches are those of ``--device cpu``, and
the model and its backend are the GPU's.
"""

import contextlib
import importlib.util
import os
from pathlib import Path

specification = importlib.util.spec_from_file_location("on_import", Path(__file__).parents[1] / "on_import.py")
assert specification is not None and specification.loader is not None
on_import = importlib.util.module_from_spec(specification)
specification.loader.exec_module(on_import)
on_import.offer_tests()


def _detect_the_target(choose):
    """The package takes this machine for one with that GPU."""
    target = os.environ["INTERPRETED_TARGET"]
    choose.detect_target = lambda: target


def _warm_up_with_one_size(warm_up):
    """Nothing is compiled, so more sizes would show nothing more, and a token takes seconds."""
    whole = warm_up.warm_up_passes
    warm_up.sizes = lambda limit, kind=None: [min(limit, 2)]
    warm_up.last_of_each = lambda limit, kind: []
    warm_up.warm_up_passes = lambda *given: (one for one in whole(*given) if len(one.positions) <= 2)


def _compute_gemms_in_torch(model):
    """The GEMMs that go through a launcher."""
    from nvfp4_sgl.cutedsl_kernels import launcher
    from tests.support.reference_gemms import ReferenceLauncher
    from tests.support.server_events import tell_freeze

    runner = ReferenceLauncher(os.environ["INTERPRETED_TARGET"])
    tell_freeze(runner)
    launcher.install(runner)


def _warm_up_several_models(gemm_planner):
    """A frozen launcher takes the kernels of another model's warm-up, as the one on CUDA does with its library."""
    from nvfp4_sgl.cutedsl_kernels import launcher
    from tests.support.reference_gemms import ReferenceLauncher

    warm_up = gemm_planner.GemmPlanner.warm_up

    def thawed(self, *given):
        runner = launcher.current()
        assert isinstance(runner, ReferenceLauncher)
        runner.ready = None
        warm_up(self, *given)

    gemm_planner.GemmPlanner.warm_up = thawed


def _hook_as_on_a_cpu(hooks):
    """SGLang's kernels for drafts are a GPU's; here its tensors are a CPU's."""
    chosen = hooks.hooks
    hooks.hooks = lambda *, on_gpu, blocks: chosen(on_gpu=False, blocks=blocks)


def _rerun_prompts(prompt_graphs):
    """A pass in a graph is the one that would have been captured, on the graph's tensors."""
    if "INTERPRETED_PROMPTS" not in os.environ:
        return
    from tests.support import reruns

    captured = prompt_graphs.capture

    def capture(runner):
        with reruns.instead_of_graphs():
            captured(runner)

    prompt_graphs.captured_tokens = lambda: (int(os.environ["INTERPRETED_PROMPTS"]),)
    prompt_graphs.torch.cuda.mem_get_info = lambda: (0, 0)
    prompt_graphs.parallel.graph_capture = contextlib.nullcontext
    prompt_graphs.capture = capture


def _repeat_no_work(interpreter):
    """Interpret faster; values stay what they are."""
    from tests.support import interpreter_speed

    interpreter_speed.install()


on_import.patch_on_import(
    {
        "triton.runtime.interpreter": _repeat_no_work,
        "nvfp4_sgl.targets.choose": _detect_the_target,
        "nvfp4_sgl.targets.fused.warm_up": _warm_up_with_one_size,
        "nvfp4_sgl.targets.fused.gemm_planner": _warm_up_several_models,
        "nvfp4_sgl.serving.drafts.hooks": _hook_as_on_a_cpu,
        "nvfp4_sgl.serving.model": _compute_gemms_in_torch,
        "nvfp4_sgl.serving.prompt_graphs": _rerun_prompts,
    }
)
if "PLANTED_FAULT" in os.environ:  # beside what is replaced, in other modules
    faults = Path(__file__).parents[1] / "planted_faults" / "sitecustomize.py"
    exec(compile(faults.read_text(), str(faults), "exec"), {"__file__": str(faults), "__name__": "planted_faults"})
