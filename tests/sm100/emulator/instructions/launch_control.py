"""Cluster launch control: a running cluster takes over the work of one that has not begun.

Source: PTX ISA, ``clusterlaunchcontrol.try_cancel`` and ``query_cancel``. The response is opaque there; here it is the
first CTA's index in three words and whether there is one in the fourth. Clusters are given in the order in which they
would begin. A request may fail while clusters are left, as it does on hardware (QuACK's tile scheduler tells of it):
in the shuffled modes some do.
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, instruction
from tests.sm100.emulator.errors import HazardError, MemoryFaultError, UnsupportedError
from tests.sm100.emulator.handover import Message
from tests.sm100.emulator.warp import Mask, Warp, active

RESPONSE_BYTES = 16
NOBODY = 0xDEADDEAD
"""What the index of a refused request is: it must not be used."""
SPURIOUS = 0.15
"""Share of requests that fail although clusters are left, in the shuffled modes."""


def _respond(warp: Warp) -> np.ndarray:
    """The response to a request that takes effect now."""
    launch = warp.cta.launch
    spurious = launch.options.mode != "immediate" and launch.random.random() < SPURIOUS
    taken = launch.cancel() if not spurious else None
    words = (*taken, 1) if taken is not None else (NOBODY, NOBODY, NOBODY, 0)
    return np.array(words, np.uint32).view(np.uint8)


@instruction("clusterlaunchcontrol.try_cancel")
def build_request(decoder: Decoder) -> Execute:
    decoder.expect("async", "mbarrier::complete_tx::bytes", "b128")
    decoder.one_of("shared::cta", default="")
    multicast = decoder.flag("multicast::cluster::all")
    decoder.arity(2)
    destination, barrier = decoder.address(0), decoder.address(1)

    def execute(warp: Warp, mask: Mask) -> None:
        cta, cluster = warp.cta, warp.cta.cluster
        for lane in active(mask):
            if cta.refused:
                raise HazardError("clusterlaunchcontrol.try_cancel after a response that was seen to have failed")
            owner, offset = cluster.locate(int(destination(warp)[lane]))
            place, report = cluster.locate(int(barrier(warp)[lane]))
            if offset % RESPONSE_BYTES:
                raise MemoryFaultError(f"response at shared offset {offset}: expected a multiple of {RESPONSE_BYTES}")
            if owner is not cta or place is not cta:
                raise UnsupportedError("a response to another CTA's shared memory")
            targets = cluster.ctas if multicast else [cta]
            reports = [target.shared_address(report) for target in targets]
            for address in reports:
                cluster.memory_barrier(address, warp.actor, asynchronous=True)
            writers = [warp.actor.issue(int(lane)) for _ in targets]

            def respond(targets=targets, reports=reports, writers=writers, offset=offset):
                response = _respond(warp)
                for target, address, writer in zip(targets, reports, writers, strict=True):
                    target.shared.write(offset, response, writer)
                    message = Message.to_all(cta.rank, writer.clock)
                    cluster.memory_barrier(address, writer).complete(RESPONSE_BYTES, message)

            cta.launch.statistics.engine_operations["launch_control"] += 1
            cluster.engines.issue("tma_load", None, [respond])

    return execute


@instruction("clusterlaunchcontrol.query_cancel")
def build_query(decoder: Decoder) -> Execute:
    what = decoder.one_of("is_canceled", "get_first_ctaid", *(f"get_first_ctaid::{axis}" for axis in "xyz"))
    decoder.expect("pred" if what == "is_canceled" else "b32", "b128")
    vector = what == "get_first_ctaid"
    if vector:
        decoder.expect("v4")
    decoder.arity(2)
    response = decoder.read(1, "b128")
    items = decoder.vector(0)
    if len(items) != (4 if vector else 1):
        raise UnsupportedError(f"{len(items)} destinations")
    writes = [decoder.write(item) for item in items]

    def execute(warp: Warp, mask: Mask) -> None:
        words = np.ascontiguousarray(response(warp)).view(np.uint32).reshape(-1, 4)
        if what != "is_canceled":
            first = 0 if vector else "xyz".index(what[-1])
            for index, write in enumerate(writes[:3]):
                write(warp, np.ascontiguousarray(words[:, first + index]), mask)
            return
        taken = words[:, 3] != 0
        if not taken[active(mask)].all():
            warp.cta.refused = True
        writes[0](warp, taken, mask)

    return execute
