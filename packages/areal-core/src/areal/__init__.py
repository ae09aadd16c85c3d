"""AReaL: asynchronous reinforcement learning of language models; this is the door that plugins use."""

from areal.contracts.component import API, Component
from areal.hookspecs import hookimpl

__all__ = ["API", "Component", "hookimpl"]
__version__ = "0.1.0"
