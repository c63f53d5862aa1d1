"""``nvfp4-sgl convert``: an NVFP4 checkpoint out of any checkpoint that is read.

``plan`` decides from headers what is written where, ``matrix`` quantises, ``shard`` writes a file, ``folder`` keeps the
progress of a conversion in its directory, ``words`` describes the result, and ``run`` puts them together. ``at_load``
converts while a server loads, and writes nothing.
"""
