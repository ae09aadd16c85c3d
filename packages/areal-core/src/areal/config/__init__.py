"""Recipes: what they may say, how they are read, and how they are printed; imports nothing heavy."""

from areal.config.load import Resolve, dump, load_recipe, split_arguments, to_plain
from areal.config.schema import RunConfig, Selected, config_schema
from areal.config.source import bundled_recipes

__all__ = [
    "Resolve",
    "RunConfig",
    "Selected",
    "bundled_recipes",
    "config_schema",
    "dump",
    "load_recipe",
    "split_arguments",
    "to_plain",
]
