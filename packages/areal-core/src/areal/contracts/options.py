"""The base of every component's options: a component owns its options, core never mirrors them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
"""How everything that a recipe may hold is read: no unknown key, no NaN, the docstring is the description."""


class Options(BaseModel):
    """Invariant: frozen after validation, and an unknown key is an error that the recipe's reader explains.

    A plugin that forwards its library's own options sets ``extra="allow"`` and passes ``model_extra`` on.
    """

    model_config = STRICT
