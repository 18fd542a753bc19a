"""Kernels and their pure-PyTorch definitions. Knows tensors, not graphs."""
