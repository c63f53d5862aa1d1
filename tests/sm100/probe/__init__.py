"""The smallest kernels of each instruction that SM100 kernels need, each with what NumPy expects of it.

The first step of first light (``launch/check_gpu`` on a Blackwell GPU): what departs here is an instruction, a layout
or a descriptor that was read wrongly from the manual, not a kernel. The same kernels run in the emulator, so that the
expectations, and the code that compares, are known to be right before a GPU sees them.
"""
