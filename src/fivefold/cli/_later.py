"""Imports that happen when a name is first used: help and wrong command lines cost no second.

``with later():`` around imports leaves stand-ins under the same names. A command whose arguments
are wrong, or whose help is asked for, never loads what it would have worked with.
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Later:
    """What stands for one name of one module until it is used."""

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

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._get()(*args, **named)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self._get())

    def __bool__(self) -> bool:
        return bool(self._get())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._get())

    def __len__(self) -> int:
        return len(self._get())

    def __contains__(self, value: Any) -> bool:
        return value in self._get()

    def __getitem__(self, key: Any) -> Any:
        return self._get()[key]

    def __eq__(self, other: object) -> bool:
        return bool(self._get() == other)

    def __hash__(self) -> int:
        return hash(self._get())

    def __repr__(self) -> str:
        return repr(self._get())

    def __str__(self) -> str:
        return str(self._get())

    def __or__(self, other: Any) -> Any:
        return self._get() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._get()


class _Module:
    """A module of stand-ins, as an import statement wants one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return _Later(self._name, name)


class _Package:
    """What ``import a.b as c`` takes its last name from."""

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
