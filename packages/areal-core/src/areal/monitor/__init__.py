"""Watching a run: its folder, its progress, its numbers, its summary."""
