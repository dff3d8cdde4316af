"""Imports that happen when a name is first used: help and wrong command lines cost no second.

``with later():`` around imports leaves stand-ins under the same names. A command whose arguments
are wrong, or whose help is asked for, never loads what it would have worked with.
"""

from __future__ import annotations

import builtins
import importlib
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Later:
    """Placeholder of one name of one module until it is used."""

    __slots__ = ("_found", "_module", "_name")

    def __init__(self, module: str, name: str | None) -> None:
        self._module, self._name = module, name
        self._found: Any = None

    def _get(self) -> Any:
        if self._found is None:
            module = importlib.import_module(self._module)
            if self._name is None:
                self._found = module
            else:
                if not hasattr(module, self._name):  # from a.b import c, where c is a module
                    importlib.import_module(f"{self._module}.{self._name}")
                self._found = getattr(module, self._name)
        return self._found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get(), name)


def _on_what_it_stands_for(work: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **named: work(self._get(), *args, **named)


# Python looks these up on the class, so they have to stand there by name.
_WORK: dict[str, Callable[..., Any]] = {
    "__call__": lambda found, *args, **named: found(*args, **named),
    "__instancecheck__": lambda found, value: isinstance(value, found),
    "__bool__": bool, "__iter__": iter, "__len__": len, "__hash__": hash, "__repr__": repr,
    "__str__": str, "__contains__": operator.contains, "__getitem__": operator.getitem,
    "__eq__": operator.eq, "__or__": operator.or_, "__ror__": lambda found, other: other | found,
}  # fmt: skip
for _name, _work in _WORK.items():
    setattr(_Later, _name, _on_what_it_stands_for(_work))


class _Module:
    """A module of stand-ins, as an import statement wants one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return _Later(self._name, name)


class _Package:
    """Placeholder that ``import a.b as c`` takes its last name from."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return _Later(self._name, None)


@contextmanager
def later() -> Iterator[None]:
    """Put off the imports in here until their names are used.

    What is used while a file is read (a base class, an exception that is caught, an alias in an
    option) is imported outside of it.
    """
    usual = builtins.__import__

    def put_off(
        name: str, _globals: Any = None, _locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        assert level == 0, "no import is relative in this house"
        if fromlist:
            return _Module(name)
        # "import a.b as c" takes b from what it gets, "import a as c" takes it as it is.
        return _Package(name) if "." in name else _Later(name, None)

    builtins.__import__ = put_off  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.__import__ = usual
