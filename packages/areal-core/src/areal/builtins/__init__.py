"""Builtins."""
