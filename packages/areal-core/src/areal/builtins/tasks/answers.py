"""Finding the final answer in a reply."""

from __future__ import annotations

import re

MARK = "####"
"""What stands before the final answer in GSM8K's solutions."""


def after_mark(text: str) -> str | None:
    """Return what follows the last ``####``, or None."""
    return text.rpartition(MARK)[2].strip() if MARK in text else None


def in_tag(text: str, tag: str) -> str | None:
    """Return what stands between the last ``<tag>`` and ``</tag>``, or None."""
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def last_number(text: str) -> str | None:
    """Return the last number as it is written, without thousands separators, or None."""
    found = re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", text, re.ASCII)
    return found[-1].replace(",", "") if found else None
