"""Parts of `benchmarks/gpu_attention.py`."""
