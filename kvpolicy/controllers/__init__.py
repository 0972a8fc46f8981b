"""Residency controllers by name: ``make("hisparse:device_buffer_rows=256")``, ``register``, ``names``."""

from kvpolicy.controllers.base import Controller
from kvpolicy.controllers.registry import (
    ControllerLike,
    catalogue,
    describe,
    make,
    names,
    register,
)

__all__ = ["Controller", "ControllerLike", "catalogue", "describe", "make", "names", "register"]
