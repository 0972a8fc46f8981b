"""Checks that anybody's controller can be put through."""

from kvpolicy.testing.controller import Scorecard, check_controller

__all__ = ["Scorecard", "check_controller"]
