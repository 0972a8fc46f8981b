"""Triton forms of the kernels, one module beside each reference, with the same functions."""
