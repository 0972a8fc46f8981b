"""Geometry as data: what a model keeps per token and who reads it. No torch, no weights."""
