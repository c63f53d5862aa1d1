"""What is told of a checkpoint: ``inspect`` by its headers and values, ``verify`` beside the one it was made from.

``inspection`` and ``verification`` are the two reports, ``compare`` holds matrices against each other by
``thresholds``, ``html_report`` draws it. What is found while values are read is in
:mod:`nvfp4_sgl.checkpoint.scan`.
"""
