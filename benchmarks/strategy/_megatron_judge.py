"""Megatron-LM's own validation of its arguments, run without a GPU as the judge of recipes.

Its source is a copy that somebody makes; only what looks at the machine is answered here: how many
processes there are, what an H100 can do, that Transformer Engine is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import sys
import typing
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from fivefold.strategy._recipes.schemas import recognise

HOPPER = (9, 0)
_TOOLS = "2.14.0"  # of Transformer Engine, as new as the source asks for


class Judge:
    """``parse_args`` and ``validate_args`` of a copy of Megatron-LM.

    Args:
        source: The folder that holds ``megatron``.

    Raises:
        ImportError: The copy cannot be loaded.
    """

    def __init__(self, source: Path) -> None:
        sys.path.insert(0, str(source))
        if not hasattr(typing, "override"):  # of Python 3.12
            typing.override = lambda method: method  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._module: Any = importlib.import_module("megatron.training.arguments")
            self.utils: Any = importlib.import_module("megatron.core.utils")

    def refuses(self, flags: list[str], environment: Mapping[str, str], world: int) -> str:
        """Return why a command line is refused on so many processes; empty where it is not."""
        said = io.StringIO()
        with (
            _machine(self, environment, world),
            contextlib.redirect_stdout(said),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            try:
                with (
                    contextlib.redirect_stderr(said),
                    mock.patch.object(sys, "argv", ["x", *flags]),
                ):
                    args = self._module.parse_args(ignore_unknown_args=True)
                    self._module.validate_args(args, {})
            except SystemExit:
                return f"arguments: {said.getvalue().strip().splitlines()[-1][:150]}"
            except Exception as error:  # noqa: BLE001 - whatever it raises is its verdict
                return f"{type(error).__name__}: {str(error)[:150]}"
        return ""


def command_of(path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the flags of a recipe of Megatron-LM as it would start it, and its environment."""
    text = path.read_text(encoding="utf-8")
    found = recognise(path, text)
    flags: list[str] = []
    settings = {} if found is None else found.settings
    for name, setting in settings.items():
        if not setting.written.startswith("--") or name.startswith(("launch", "words")):
            continue
        value = setting.value
        words = (
            value
            if isinstance(value, list)
            else shlex.split(str(value).strip("[]").replace(",", " "))
        )
        words = [str(word) for word in words]
        if setting.written == "--moe-layer-freq" or "pattern" in name or "layout" in name:
            words = [str(value)]
        if str(value).lower() != "false":
            flags += [setting.written, *([] if str(value).lower() == "true" else words)]
    assigned = re.findall(
        r"^\s*(?:export\s+)?((?:CUDA|NVTE)_\w+)\s*[=:]\s*[\"']?(\w+)", text, re.MULTILINE
    )
    return flags, dict(assigned)


@contextlib.contextmanager
def _machine(judge: Judge, own: Mapping[str, str], world: int) -> Iterator[None]:
    """Answer what Megatron-LM asks of the machine."""
    version = importlib.import_module("packaging.version").Version(_TOOLS)
    environment = {**own, "WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(mock.patch("torch.cuda.get_device_capability", return_value=HOPPER))
        properties = mock.Mock(major=HOPPER[0], minor=HOPPER[1], total_memory=80 << 30)
        seen = mock.patch("torch.cuda.get_device_properties", return_value=properties)
        stack.enter_context(seen)
        stack.enter_context(mock.patch.object(judge.utils, "get_te_version", return_value=version))
        yield
