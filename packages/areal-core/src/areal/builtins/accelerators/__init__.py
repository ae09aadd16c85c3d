"""Builtin devices: the CPU and NVIDIA GPUs."""
