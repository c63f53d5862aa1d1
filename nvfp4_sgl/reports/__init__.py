"""Reports on a checkpoint: ``inspect`` on its headers and values, ``verify`` beside its source.

``inspection`` and ``verification`` are the two reports, ``compare`` holds matrices against each other by
``thresholds``, ``html_report`` draws it. What is found while values are read is in
:mod:`nvfp4_sgl.checkpoint.scan`.
"""
