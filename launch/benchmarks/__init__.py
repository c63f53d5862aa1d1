"""Benchmarks behind launch/bench_* and profile_decoder; tests time nothing."""
