"""Every field of a request's body: offered, translated, accepted without effect, or refused by name.

Two levels divide the work:

* :func:`.bodies.checked_body`, in :mod:`nvfp4_sgl.serving.guard`, sees the JSON that a client sends, before SGLang
  parses it. It refuses unknown names, fields that are not offered, and values of the wrong type or range. What a range
  depends on must be known without the model. Then it translates what clients say in other words than SGLang's
  (:mod:`.translation`), and refuses fields that contradict each other.
* The hooks of :mod:`nvfp4_sgl.serving.requests` see what SGLang has made of it, from whichever path it came. They check
  what depends on the vocabulary, the context, the pool and the number of prompts, and stop strings, which several paths
  make of other fields. The scheduler's hook repeats what would end it, for other front ends.

:mod:`.checks` and :mod:`.objects` have the kinds of values, :mod:`.field` the record of a field; most other files are
tables.
"""
