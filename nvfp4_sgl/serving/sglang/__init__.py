"""All that touches SGLang's private names: the ledger that lists them, and what is done with them, a file a concept.

The ledger is :mod:`.names` and :mod:`.hooked`, tables of :class:`.private.Private`, with :mod:`.log_lines`;
:mod:`.ledger` looks names up and checks them against the SGLang that is installed. The other files here hold one
object of SGLang's each, and no policy of ours.
"""
