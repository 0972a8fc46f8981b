"""Speculative decoding: what a drafter proposes, how much of it is verified, and which of it is kept."""
