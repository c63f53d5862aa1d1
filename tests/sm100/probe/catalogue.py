"""All probes, those first that the others build on."""

from __future__ import annotations

import functools

from tests.sm100.probe import cluster_probes, conversion_probes, half_probes, tensor_probes
from tests.sm100.probe.probe import Probe


@functools.cache
def probes() -> dict[str, Probe]:
    """Every probe by name; importing CuTeDSL takes seconds."""
    found = [
        conversion_probes.conversions(),
        *cluster_probes.probes(),
        *tensor_probes.probes(),
        *half_probes.probes(),
    ]
    return {probe.name: probe for probe in found}
