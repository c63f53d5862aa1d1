"""A rank's need of device memory, added up before anything is loaded.

``weights`` and ``pools`` count bytes, exactly; ``forecast`` adds them to what can only be estimated, and compares the
sum with what is free.
"""
