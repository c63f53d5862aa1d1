"""Where the GPU decoder's tests run: on the GPU if there is one, else under Triton's interpreter."""

from tests.support.interpreted import (
    device,
    emulated,
    pytest_pycollect_makemodule,
    pytest_runtest_call,
    pytest_runtest_protocol,
    pytest_runtest_setup,
)

__all__ = [
    "device",
    "emulated",
    "pytest_pycollect_makemodule",
    "pytest_runtest_call",
    "pytest_runtest_protocol",
    "pytest_runtest_setup",
]
