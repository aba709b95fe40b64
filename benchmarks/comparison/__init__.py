"""The parts of `benchmarks/vs_handwritten.py`."""
