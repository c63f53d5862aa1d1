"""What a record of passes holds. Imports no torch, so that records are compared at once."""

FORMAT = 2
SKETCH = 16
"""Random projections of a boundary's values: the difference of two runs is known within about 1/sqrt(2 · 16) = 18 %."""
SAMPLED_VALUES = 2**22
"""Values of which digest and sketch are made; of larger outputs evenly spaced rows."""
