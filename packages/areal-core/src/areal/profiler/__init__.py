"""Profiler."""
