"""What launch/bench_kernels, bench_sm100, bench_serving and profile_decoder run: benchmarks, no timed tests."""
