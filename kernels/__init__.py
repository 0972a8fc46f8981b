"""Compute kernels: a plain-torch reference of each, and its Triton form in ``triton/``.

Imports nothing from the rest of the project. Every function states shapes, dtypes and why its
result does not depend on the batch it runs in: a row's bits are a function of that row alone.
"""
