"""Recordings of what live runs selected, and what can be computed from them (docs/recordings.md)."""

from kvpolicy.recording.reader import Recording
from kvpolicy.recording.writer import RecordingWriter

__all__ = ["Recording", "RecordingWriter"]
