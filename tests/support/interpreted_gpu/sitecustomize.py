"""Put on PYTHONPATH, with TRITON_INTERPRET=1, to serve as on a GPU, but with the kernels interpreted on the CPU.

``INTERPRETED_TARGET`` is the target, ``sm_90a`` or ``sm_100a``, whose GEMMs are computed in torch. Nothing else of a
server changes: SGLang takes the machine for one without a GPU, so pools and batches are those of ``--device cpu``, and
the model and its backend are the GPU's.
"""

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


def _repeat_no_work(interpreter):
    """Interpret faster; values stay what they are."""
    from tests.support import interpreter_speed

    interpreter_speed.install()


on_import.patch_on_import(
    {
        "triton.runtime.interpreter": _repeat_no_work,
        "nvfp4_sgl.targets.choose": _detect_the_target,
        "nvfp4_sgl.targets.fused.warm_up": _warm_up_with_one_size,
        "nvfp4_sgl.serving.model": _compute_gemms_in_torch,
    }
)
