"""The outer rules, one file each: a rule is found by being here.

A class of a rule carries all that is known of it: its key and label, its settings and their
defaults, whether it waits, the buffers that it keeps and its merge. Whatever lists, parses, prices
or draws rules asks the registry in ``base``.
"""

from __future__ import annotations

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
