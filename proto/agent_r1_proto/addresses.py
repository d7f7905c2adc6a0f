"""Addresses as they may be shown."""

from __future__ import annotations

import re


def hide_password(url: str) -> str:
    """Return a URL that may be shown."""
    return re.sub(r"(//[^:/@]*):.*@", r"\1:***@", url)
