"""Learned policies as files of arrays and JSON, and the controller that decides with one. numpy only."""

from kvpolicy.learned.artifact import Artifact, read_artifact, write_artifact
from kvpolicy.learned.controller import Learned

__all__ = ["Artifact", "Learned", "read_artifact", "write_artifact"]
