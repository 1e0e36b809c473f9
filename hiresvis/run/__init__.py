"""A run as frozen events, and the folder that keeps them."""

from __future__ import annotations

from hiresvis.run.directory import RunDirectory, read_events
from hiresvis.run.events import Event

__all__ = ["Event", "RunDirectory", "read_events"]
