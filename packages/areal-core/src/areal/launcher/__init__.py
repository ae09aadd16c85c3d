"""Launcher."""
