"""CUDA sources, and the one file that compiles and launches them."""
