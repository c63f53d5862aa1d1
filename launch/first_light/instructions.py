"""The step ``instructions``: every probe, then what SM100 shares with Hopper against what an H200 gave.

``python -m first_light.instructions [--emulated]``
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch

from first_light.journal import Journal
from tests.sm100.hardware.catalogue import catalogue
from tests.sm100.hardware.record import Recording
from tests.sm100.hardware.runners import compile_case, emulated_outputs, gpu_outputs
from tests.sm100.probe.catalogue import probes
from tests.sm100.probe.probe import Probe
from tests.support.departure import Departure

SM100 = "sm_100a"
Run = Callable[[Probe], Mapping[str, torch.Tensor]]


def main(arguments: list[str]) -> int:
    journal, emulated = Journal.of_this_process(), "--emulated" in arguments
    try:
        run_probes(journal, in_emulator if emulated else on_gpu(journal))
        if not emulated:
            compare_with_hopper(journal)
    except Departure as error:
        print(f"DEPARTS: {error}")
        return 1
    return 0


def run_probes(journal: Journal, run: Run) -> None:
    """Each in turn.

    Raises:
        Departure: of the first that gives something else than NumPy.
    """
    for name, probe in probes().items():
        print(f"{name}: {probe.shows}", flush=True)
        with journal.item(name):
            probe.compare(run(probe))


def in_emulator(probe: Probe) -> Mapping[str, torch.Tensor]:
    return emulated_outputs(probe.case, compile_case(probe.case, SM100))


def on_gpu(journal: Journal) -> Run:
    """Runs a probe on the GPU, its code left in the step's folder."""

    def run(probe: Probe) -> Mapping[str, torch.Tensor]:
        return gpu_outputs(probe.case, journal.keep_code(probe.name))

    return run


def compare_with_hopper(journal: Journal) -> None:
    """The cases of ``launch/check_sm90``, compiled for this GPU.

    Raises:
        Departure: of the first result that is not the recorded one.
    """
    recorded = Recording.load()
    for name, case in catalogue().items():
        print(f"{name}: as on {recorded.machine['gpu']}", flush=True)
        with journal.item(name):
            results = case.results(gpu_outputs(case, journal.keep_code(name)))
            wrong = [
                label for label, result in results.items() if not recorded.agrees(label, result, case.ulp.get(label))
            ]
            if wrong:
                raise Departure(
                    wrong[0].removeprefix(f"{name}/"),
                    expected=f"the bytes that {recorded.machine['gpu']} gave, of SHA-256"
                    f" {recorded.digests.get(wrong[0], 'of a value within some ulp')}",
                    found=f"others; first 32: {results[wrong[0]][:32].hex()}",
                    detail=f"{len(wrong)} of {len(results)} results differ: {', '.join(wrong[:8])}",
                )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
