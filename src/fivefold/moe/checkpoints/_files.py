"""Published checkpoints as they lie on disk: safetensors files, read one tensor at a time."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fivefold.errors import DataError, UnsupportedError
from fivefold.files import read_json

_INDEX = "model.safetensors.index.json"


def open_checkpoint(path: str | Path) -> Mapping[str, torch.Tensor]:
    """A model's safetensors files as a state dictionary that reads a tensor when it is asked for.

    So ``convert_checkpoint`` takes a layer out of a model that does not fit the memory.

    Args:
        path: A folder with ``model.safetensors.index.json`` or with safetensors files, or one such
            file.

    Returns:
        Names to tensors, on the CPU.

    Raises:
        DataError: There are no such files, one is damaged, or two have a tensor of one name.
        UnsupportedError: safetensors is not installed.

    Examples:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"gate.weight": torch.zeros(1, 2)}, f"{folder}/model.safetensors")
        ...     state = open_checkpoint(folder)
        ...     {name: tuple(tensor.shape) for name, tensor in state.items()}
        {'gate.weight': (1, 2)}
    """
    try:
        module = importlib.import_module("safetensors")
    except ImportError as error:
        message = "reading checkpoints needs safetensors, which is not installed"
        raise UnsupportedError(message, hint="pip install 'fivefold[hf]'") from error
    return _Files(Path(path), module)


class _Files(Mapping[str, torch.Tensor]):
    """Tensors by name; files are opened when first needed, and stay open."""

    def __init__(self, path: Path, module: Any) -> None:
        self._module = module
        self._open: dict[Path, Any] = {}
        self._places = self._by_index(path) if (path / _INDEX).is_file() else self._by_files(path)

    def _by_index(self, folder: Path) -> dict[str, Path]:
        try:
            found = read_json(folder / _INDEX)["weight_map"]
            places = {name: folder / file for name, file in found.items()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DataError(f"{folder / _INDEX} is damaged: {error!r}") from error
        missing = sorted({str(place) for place in places.values() if not place.is_file()})
        if missing:
            raise DataError(
                f"{folder / _INDEX} names {missing[0]}, which is not there",
                hint=f"download the missing files again ({len(missing)} in all)",
            )
        return places

    def _by_files(self, path: Path) -> dict[str, Path]:
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if not files:
            raise DataError(
                f"there are no safetensors files in {path}",
                hint="give the folder of a downloaded model, or one .safetensors file",
            )
        places: dict[str, Path] = {}
        for file in files:
            for name in self._file(file).keys():  # noqa: SIM118 - no mapping: it has keys() only
                if name in places:
                    raise DataError(f"{name} is in {places[name]} and in {file}")
                places[name] = file
        return places

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self._module.safe_open(str(path), framework="pt")
            except (OSError, self._module.SafetensorError) as error:
                raise DataError(
                    f"{path} cannot be read as safetensors: {error}", hint="download it again"
                ) from error
        return self._open[path]

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self._places[name]
        try:
            tensor: torch.Tensor = self._file(file).get_tensor(name)
        except self._module.SafetensorError as error:
            raise DataError(f"{file} does not have {name!r}, which its index says") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
