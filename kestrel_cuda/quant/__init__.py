"""Grouped quantization and the packed layout of weights, in NumPy: the definition every kernel is compared with."""
