"""Kernels: a plain-torch reference of each, and its Triton form in ``triton/``.

A model computes through ``ops``, the memory hierarchy looks up and copies through ``memory_ops``;
``backend`` says which form runs. Imports nothing from the rest of the project. Every function states
shapes, dtypes and why its result does not depend on the batch it runs in: a row's bits are a
function of that row alone.
"""
