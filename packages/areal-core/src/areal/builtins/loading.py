"""What loading a Hugging Face model may raise, for engine and backend alike."""

from __future__ import annotations

from safetensors import SafetensorError

LOADING_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, AssertionError, SafetensorError)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without its full stop."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(" .:")
