"""``nvfp4-sgl convert``: make an NVFP4 checkpoint of any checkpoint that can be read.

``plan`` decides from headers what is written where, ``matrix`` quantises, ``shard`` writes a file, ``folder`` keeps the
progress of a conversion in its directory, ``words`` describes the result, and ``run`` puts them together. ``at_load``
converts while a server loads, and writes nothing.
"""
