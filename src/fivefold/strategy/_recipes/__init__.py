"""Readers of recipes, one program each.

A recipe is recognised by its schema (``schemas``), its settings are read by the program's own words
and rules (``megatron``, ``torchtitan``, ``automodel``). Every flag or key is accounted for
(``told``): read, left out, or harmless (``flags.toml`` says why).
"""
