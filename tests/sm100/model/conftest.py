"""The Triton kernels of these tests are interpreted."""

from tests.support.interpreted import (
    device,
    pytest_pycollect_makemodule,
    pytest_runtest_protocol,
    pytest_runtest_setup,
)

__all__ = ["device", "pytest_pycollect_makemodule", "pytest_runtest_protocol", "pytest_runtest_setup"]
