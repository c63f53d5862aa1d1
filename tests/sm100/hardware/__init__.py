"""Kernels that run both in the emulator and on a Hopper GPU, and what they gave on one.

An SM100 kernel shares most of its instructions with sm_90a: everything but tcgen05 and the FP4 conversions. The cases
here exercise those instructions through CuTeDSL. A case run on a GPU leaves digests in ``recorded.json``; the
emulator must give the same bytes ever after (``test_recorded_hardware.py``), so its results for these instructions
rest on silicon, not on a reading of the manual.

``launch/check_sm90`` runs the cases on the GPU of the machine, compares, and with ``--record`` writes the file. Needs
torch, numpy and nvidia-cutlass-dsl alone.
"""
