"""Speculative decoding: SGLang's EAGLE worker with our draft model, backend and rule of acceptance, on the CPU."""
