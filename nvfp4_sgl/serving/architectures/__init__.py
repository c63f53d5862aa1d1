"""Deliberately empty: named to SGLang as its external model package while the model registry is imported.

With an external package SGLang defers importing its some 200 model modules until an architecture is asked for that
is not registered. Ours is registered explicitly (:mod:`nvfp4_sgl.serving.registration`), because SGLang turns import
errors inside an external package into warnings.
"""
