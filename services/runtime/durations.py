"""Durations as text for people: in the learner's log and by the launcher."""

from __future__ import annotations


def format_duration(seconds: float) -> str:
    """Render seconds as `1h02m`, `3m20s` or `12s`; less than nothing is `0s`."""
    minutes, secs = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{secs:02d}s" if minutes else f"{secs}s"
