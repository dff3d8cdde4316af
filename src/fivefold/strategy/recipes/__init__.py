"""Recipes of other programs, checked before anyone waits for a GPU: are they valid, do they fit.

A recipe is recognised by its schema (``_schemas``), its settings are read by the program's own
words and rules (``_megatron``, ``_torchtitan``, ``_automodel``), and the plan that comes out is
asked what every plan is asked (``_check``). Every flag or key is accounted for: read, left out, or
harmless (``flags.toml`` says why); every value that the recipe does not say is assumed, and said.
"""

from fivefold.strategy.recipes._check import RecipeVerdict, check_recipe, check_recipes

__all__ = ["RecipeVerdict", "check_recipe", "check_recipes"]
