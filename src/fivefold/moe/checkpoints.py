"""Published checkpoints: read one tensor at a time, brought to ``MoE``'s layout, and back.

Expert weights are kept per expert (``experts.3.gate_proj.weight``) or stacked; gate and up
projections apart or as halves of one tensor. Here they are stacked, ``w13`` with the gate rows
first. Nothing is moved; stacked tensors are copies. Nothing is cast but float8 in blocks with
scales, as DeepSeek-V3 publishes it, which becomes bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fivefold.errors import ConfigurationError, DataError, optional_module, require_one_of
from fivefold.files import read_json

_INDEX = "model.safetensors.index.json"

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_SCALED_BLOCK = 128
_ROOTS = ("experts.", "gate.", "router.", "shared_expert")
_COUNTERS = ("tokens_per_expert",)  # torchtitan's, no weight


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Names of one family; ``{}`` stands for an expert's number where experts lie apart."""

    gate: str
    up: str | None  # None: gate and up are halves of one tensor
    down: str
    router: str = "gate.weight"
    bias: str | None = None
    shared: tuple[str, str, str] | None = None  # gate, up, down of the shared expert


_SHARED = (
    "shared_experts.gate_proj.weight",
    "shared_experts.up_proj.weight",
    "shared_experts.down_proj.weight",
)
_QWEN3 = _Layout(
    gate="experts.{}.gate_proj.weight",
    up="experts.{}.up_proj.weight",
    down="experts.{}.down_proj.weight",
)
LAYOUTS: dict[str, _Layout] = {
    "mixtral": _Layout(
        gate="experts.{}.w1.weight",
        up="experts.{}.w3.weight",
        down="experts.{}.w2.weight",
    ),
    "qwen3": _QWEN3,
    "deepseek": replace(_QWEN3, bias="gate.e_score_correction_bias", shared=_SHARED),
    "transformers": _Layout(
        gate="experts.gate_up_proj",
        up=None,
        down="experts.down_proj",
        bias="gate.e_score_correction_bias",
        shared=_SHARED,
    ),
    "torchtitan": _Layout(
        router="router.gate.weight",
        gate="experts.w1",
        up="experts.w3",
        down="experts.w2",
        bias="expert_bias",
        shared=("shared_experts.w1.weight", "shared_experts.w3.weight", "shared_experts.w2.weight"),
    ),
}
"""Known layouts: per expert as on disk for mixtral, qwen3 and deepseek; stacked for transformers
(version 5, in memory) and torchtitan."""


def convert_checkpoint(
    state: Mapping[str, torch.Tensor], layout: str, *, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Make ``MoE``'s state dictionary from a published layout.

    Args:
        state: The model's state dictionary, or ``open_checkpoint``; other layers are left alone.
        layout: A key of ``LAYOUTS``.
        prefix: What stands before the layer's names, such as ``"model.layers.3.mlp."``.

    Returns:
        What ``MoE.load_state_dict`` takes.

    Raises:
        ConfigurationError: The layout is unknown.
        DataError: A weight is missing or has another shape than the others, or the layer has more
            than the layout has a place for.

    Examples:
        >>> state = {"gate.weight": torch.zeros(1, 2)}
        >>> for name in ("w1", "w3", "w2"):
        ...     state[f"experts.0.{name}.weight"] = torch.ones(2, 2)
        >>> {name: tuple(t.shape) for name, t in convert_checkpoint(state, "mixtral").items()}
        {'gate.weight': (1, 2), 'experts.w13': (1, 4, 2), 'experts.w2': (1, 2, 2)}
    """
    require_one_of(layout, LAYOUTS, f"there is no layout {layout!r}")
    known, layer = LAYOUTS[layout], _Read(state)
    router = _take(layer, prefix + known.router)
    if router.ndim != 2 or 0 in router.shape:
        raise DataError(
            f"{prefix + known.router} has shape {tuple(router.shape)}",
            hint="a router is [experts, hidden]: check the layout and the prefix",
        )
    w13 = _stacked(layer, prefix + known.gate, len(router))
    if known.up is not None:
        w13 = _joined(w13, _stacked(layer, prefix + known.up, len(router)))
    w2 = _stacked(layer, prefix + known.down, len(router))
    found = {"gate.weight": router, "experts.w13": w13, "experts.w2": w2}
    if known.bias is not None and prefix + known.bias in layer:
        found["gate.selection_bias"] = layer[prefix + known.bias]
    if known.shared is not None and prefix + known.shared[0] in layer:
        gate, up, down = (_take(layer, prefix + name).unsqueeze(0) for name in known.shared)
        found |= {"shared.w13": _joined(gate, up), "shared.w2": down}
    _check_left(layer, layout, prefix)
    _check_shapes(found)
    return found


def _check_shapes(found: Mapping[str, torch.Tensor]) -> None:
    """Check that all weights are of one layer, with a gated activation."""
    experts, hidden = found["gate.weight"].shape
    wanted: dict[str, tuple[int, ...]] = {"gate.selection_bias": (experts,)}
    for part, number in (("experts", experts), ("shared", 1)):
        w13, w2 = f"{part}.w13", f"{part}.w2"
        inner = found[w2].shape[-1] if w2 in found else 0
        wanted |= {w13: (number, 2 * inner, hidden), w2: (number, hidden, inner)}
    for name, shape in wanted.items():
        if name in found and tuple(found[name].shape) != shape:
            raise DataError(
                f"{name} has shape {tuple(found[name].shape)}; the other weights make it {shape}",
                hint="the file is damaged or of another model, or the activation has no gate",
            )


class _Read(dict[str, torch.Tensor]):
    """Tensors of a state dictionary as they are asked for; float8 as bfloat16."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._state = state
        self.used: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._state

    def __missing__(self, name: str) -> torch.Tensor:
        tensor = self._state[name]
        self.used.add(name)
        if tensor.dtype in _FLOAT8:
            scale = f"{name}_scale_inv"
            if scale not in self._state:
                raise DataError(
                    f"{name} is {tensor.dtype}, and there is no {scale!r}",
                    hint="a weight in float8 needs the scales of its blocks",
                )
            self.used.add(scale)
            tensor = _widened(name, tensor, self._state[scale])
        return tensor

    def left(self, starts: str | tuple[str, ...]) -> list[str]:
        """Return the names with such a start that nobody asked for."""
        return [n for n in self._state if n.startswith(starts) and n not in self.used]


def _widened(name: str, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if weight.ndim != 2:
        raise DataError(
            f"{name} has shape {tuple(weight.shape)}; float8 is read per expert only",
            hint="convert the published files, in which experts lie apart",
        )
    rows, columns = weight.shape
    wanted = (-(-rows // _SCALED_BLOCK), -(-columns // _SCALED_BLOCK))
    if tuple(scale.shape) != wanted:
        raise DataError(
            f"the scales of {name} {tuple(weight.shape)} have shape {tuple(scale.shape)}",
            hint=f"blocks of {_SCALED_BLOCK} x {_SCALED_BLOCK} have {wanted}",
        )
    by_row = scale.float().repeat_interleave(_SCALED_BLOCK, 0)[:rows]
    factors = by_row.repeat_interleave(_SCALED_BLOCK, 1)[:, :columns]
    return (weight.float() * factors).to(torch.bfloat16)


def _check_left(state: _Read, layout: str, prefix: str) -> None:
    """Refuse to leave weights of the layer behind: it would compute something else."""
    # Without a prefix the rest of a model may stand beside the layer.
    left = [name for name in state.left(prefix or _ROOTS) if not name.endswith(_COUNTERS)]
    if left:
        raise DataError(
            f"layout {layout!r} has no place for {left[0]} ({len(left)} names in all)",
            hint="choose the layout of the model; biases of experts, a gate on the shared expert "
            "and quantised weights other than float8 in blocks are not known",
        )


def export_checkpoint(
    state: Mapping[str, torch.Tensor], layout: str, *, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Return the inverse of ``convert_checkpoint``: tensors are views where they can be.

    Args:
        state: ``MoE.state_dict()`` of a layer with a gated activation and without expert biases.
        layout: A key of ``LAYOUTS``.
        prefix: To put before the names.

    Raises:
        ConfigurationError: The layout is unknown or cannot hold what the layer has.
        DataError: A weight is missing, or has another shape than the others.
    """
    require_one_of(layout, LAYOUTS, f"there is no layout {layout!r}")
    known = LAYOUTS[layout]
    names = ["gate.weight", "experts.w13", "experts.w2"]
    names += [] if known.bias is None else ["gate.selection_bias"]
    names += [] if known.shared is None else ["shared.w13", "shared.w2"]
    if extra := [name for name in state if name not in names]:
        raise ConfigurationError(
            f"layout {layout!r} has no place for {', '.join(extra)}", hint="choose another layout"
        )
    w13, w2 = _take(state, "experts.w13"), _take(state, "experts.w2")
    _check_shapes(state)
    found = {prefix + known.router: _take(state, "gate.weight")}
    parts = {known.gate: w13, known.down: w2}
    if known.up is not None:
        parts[known.gate], parts[known.up] = w13.chunk(2, dim=1)
    for name, tensor in parts.items():
        if "{}" in name:
            found |= {prefix + name.format(e): expert for e, expert in enumerate(tensor)}
        else:
            found[prefix + name] = tensor
    if known.bias is not None and "gate.selection_bias" in state:
        found[prefix + known.bias] = state["gate.selection_bias"]
    if known.shared is not None and "shared.w13" in state:
        gate, up = state["shared.w13"][0].chunk(2, dim=0)
        for name, tensor in zip(known.shared, (gate, up, state["shared.w2"][0]), strict=True):
            found[prefix + name] = tensor
    return found


def _take(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    try:
        return state[name]
    except KeyError:
        raise DataError(
            f"the state dictionary has no {name!r}", hint="check the layout and the prefix"
        ) from None


def _stacked(state: Mapping[str, torch.Tensor], name: str, experts: int) -> torch.Tensor:
    if "{}" not in name:
        return _take(state, name)
    parts = [_take(state, name.format(expert)) for expert in range(experts)]
    odd = [e for e, part in enumerate(parts) if part.shape != parts[0].shape]
    if odd:
        raise DataError(
            f"{name.format(odd[0])} has shape {tuple(parts[odd[0]].shape)}, expert 0 "
            f"{tuple(parts[0].shape)}",
            hint="the file is damaged or of another model",
        )
    return torch.stack(parts)


def _joined(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if gate.shape != up.shape:
        raise DataError(
            f"gate and up projections differ: {tuple(gate.shape)}, {tuple(up.shape)}",
            hint="the file is damaged or of another model",
        )
    return torch.cat([gate, up], dim=1)


def open_checkpoint(path: str | Path) -> Mapping[str, torch.Tensor]:
    """Open a model's safetensors files as a state dictionary that reads tensors when asked for.

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
    module = optional_module("safetensors", extra="hf", use="reading checkpoints")
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
            raise DataError(
                f"{folder / _INDEX} is damaged: {error!r}", hint="download it again"
            ) from error
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
                    raise DataError(
                        f"{name} is in {places[name]} and in {file}",
                        hint="give one of the files, or a folder that holds one model",
                    )
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
            raise DataError(
                f"{file} does not have {name!r}, which its index says",
                hint="download the model again",
            ) from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
