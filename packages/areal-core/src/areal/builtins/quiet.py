"""transformers without its progress bars, which would fill a worker's log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Turn progress bars off inside the block, and on again if they were."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
