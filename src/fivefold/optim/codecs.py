"""How the elements of a payload are written on the wire: pure encoding and decoding.

A codec turns N float32 numbers into ``encoded_bytes(N)`` bytes and back, with the same bits on
every machine. Not-a-number and infinities travel: they decode to non-finite values and leave no
residual. Shapes: values, residual and out are float32 [N]; wire is uint8 [encoded_bytes(N)].
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from fivefold.errors import ConfigurationError, require_one_of, require_whole
from fivefold.optim.penalties import is_number

# On a CPU a piece stays in the second-level cache over all its passes, and is small enough that
# torch runs it on the calling thread: the communication thread must not wake a pool of its own.
_CPU_PIECE_ELEMENTS = 32768
_SMALLEST_SCALE = 2.0**-126  # smallest normal number: of subnormal ones machines lose bits
_LARGEST_SAFE = 2.0**127  # rounding a larger block's scale up could decode to infinity
_WORD_BYTES = 2  # wires are whole words, so that joined wires keep bfloat16 scales aligned


class Codec(ABC):
    """A way to write float32 numbers as bytes.

    Encoding is in place on a *residual*: what the wire could not hold stays in it and goes out with
    the next round (error feedback), so that nothing is lost, only late.

    References:
        Seide et al., Interspeech 2014 (error feedback); Karimireddy et al., arXiv 1901.09847.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return what ``named_codec`` and the logs call it."""

    @property
    def granule(self) -> int:
        """A payload may be cut at multiples of this many elements without changing its values."""
        return 1

    @abstractmethod
    def encoded_bytes(self, num_elements: int) -> int:
        """Return bytes on the wire of this many elements, scales included."""

    @abstractmethod
    def encode_with_feedback_(
        self, residual: torch.Tensor, wire: torch.Tensor, *, values: torch.Tensor | None = None
    ) -> None:
        """Compute v = residual + values, wire <- Q(v), residual <- v - decode(wire), in place."""

    @abstractmethod
    def decode_(self, wire: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> None:
        """Write the decoded numbers to ``out``, or add them to it, in place."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the wire of these values, without error feedback.

        Args:
            values: float32 [N], left as they are.

        Returns:
            uint8 [encoded_bytes(N)] on the same device.

        Raises:
            ConfigurationError: The values are not a flat float32 tensor.
        """
        if values.dtype != torch.float32 or values.dim() != 1:
            message = f"codecs take flat float32 tensors; got {values.dtype} of {values.dim()} dims"
            raise ConfigurationError(message, hint="use tensor.float().reshape(-1)")
        num_bytes = self.encoded_bytes(values.numel())
        wire = torch.empty(num_bytes, dtype=torch.uint8, device=values.device)
        self.encode_with_feedback_(values.clone(), wire)
        return wire

    def decode(self, wire: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Return the numbers that a wire holds.

        Args:
            wire: uint8 [encoded_bytes(num_elements)].
            num_elements: N.

        Returns:
            float32 [N] on the same device.

        Raises:
            ConfigurationError: The wire has another size than N elements need.
        """
        if wire.dtype != torch.uint8 or wire.numel() != self.encoded_bytes(num_elements):
            message = f"a wire of {wire.numel()} {wire.dtype} does not hold {num_elements} elements"
            hint = f"{self.name} needs {self.encoded_bytes(num_elements)} bytes of uint8"
            raise ConfigurationError(message, hint=hint)
        out = torch.empty(num_elements, dtype=torch.float32, device=wire.device)
        self.decode_(wire, out)
        return out


_CASTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class CastCodec(Codec):
    """Rounding to a float of 16 bits, ``"bf16"`` and ``"fp16"``, or none at all, ``"fp32"``.

    bfloat16 has float32's range and keeps 8 significant bits. float16 keeps 11, from 6e-5 to
    65504; smaller values are cut more coarsely, arrive through the error feedback, and larger
    ones travel as infinities. Pseudo-gradients are small, so ``"bf16"`` is the safe one.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in _CASTS:
            message = f"dtype must be {', '.join(map(str, _CASTS))}; got {self.dtype}"
            raise ConfigurationError(message, hint='codec="fp32" sends float32 as it is')

    @property
    def name(self) -> str:
        """``"fp32"``, ``"bf16"`` or ``"fp16"``."""
        return _CASTS[self.dtype]

    def encoded_bytes(self, num_elements: int) -> int:
        """Return the data type's bytes per element."""
        return self.dtype.itemsize * num_elements

    def encode_with_feedback_(
        self, residual: torch.Tensor, wire: torch.Tensor, *, values: torch.Tensor | None = None
    ) -> None:
        """Round residual + values to the wire; keep in the residual what that took away."""
        rounded = wire.view(self.dtype)
        scratch = _scratch(residual)
        for start, stop, _ in _pieces(residual, block=1):
            piece = residual[start:stop]
            if values is not None:
                piece.add_(values[start:stop])
            rounded[start:stop].copy_(piece)
            piece.sub_(scratch[: stop - start].copy_(rounded[start:stop]))
            torch.nan_to_num_(piece, nan=0.0, posinf=0.0, neginf=0.0)

    def decode_(self, wire: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> None:
        """Widen the wire to ``out``, or add it."""
        rounded = wire.view(self.dtype)
        if not accumulate:
            out.copy_(rounded)
            return
        scratch = _scratch(out)
        for start, stop, _ in _pieces(out, block=1):
            out[start:stop].add_(scratch[: stop - start].copy_(rounded[start:stop]))


def is_exact(codec: Codec) -> bool:
    """Return whether a codec changes nothing, so that sums need none."""
    return isinstance(codec, CastCodec) and codec.dtype == torch.float32


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Integers of 8 or 4 bits with one scale for each block of elements: ``"int8"``, ``"int4"``.

    With Q = 2^(bits-1) - 1 a block is sent as s = bf16(max |x| / Q) and round(x / s), ties to
    even; it decodes to s times the integer. The error is at most max |x| / Q / 2 * (1 + 2^-8).

    The scale is a bfloat16: float32's range, so that blocks of 1e-7 and of 1e3 keep the same
    relative error, and few enough bits that s times an integer is exact in float32. Decoding is
    therefore the same on all machines, with or without fused multiply-add, and encoding decoded
    numbers again gives the same bytes. A block whose scale would be under 2^-126 is sent as
    zeros and stays in the residual. A block with a non-finite value decodes to not-a-number.

    Wire: all scales, then the integers; with 4 bits byte j of a block of n holds element j in
    its low half and element ceil(n / 2) + j in its high half, both plus 8 (a half without an
    element holds 8). A byte of zero fills the wire up to an even size.

    Args:
        bits: 8 or 4.
        block: Elements per scale, a multiple of 16 from 16 to 32768.

    Raises:
        ConfigurationError: A value is not allowed.

    References:
        Dettmers et al., arXiv 2110.02861, blockwise quantization.

    Examples:
        >>> codec = BlockCodec(bits=4, block=64)
        >>> codec.encoded_bytes(1000)  # 16 scales of 2 bytes, 500 bytes of integers
        532
        >>> codec.decode(codec.encode(torch.tensor([7.0, -2.6, 0.0])), 3)
        tensor([ 7., -3.,  0.])
    """

    bits: Literal[4, 8] = 8
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            message = f"bits must be 4 or 8; got {self.bits!r}"
            raise ConfigurationError(message, hint='for 16 bits use codec="bf16"')
        require_whole("block", self.block, least=16, most=_CPU_PIECE_ELEMENTS)
        if self.block % 16:
            message = f"block must be a multiple of 16 from 16 to 32768; got {self.block!r}"
            raise ConfigurationError(message, hint="256 costs 1 % at 8 bits, 64 costs 6 % at 4")

    @property
    def name(self) -> str:
        """``"int8"`` or ``"int4"``."""
        return f"int{self.bits}"

    @property
    def granule(self) -> int:
        """Slices begin with a block."""
        return self.block

    def encoded_bytes(self, num_elements: int) -> int:
        """Return two bytes per block begun and ``bits`` per element, made an even number."""
        data_bytes = self._data_bytes(num_elements)
        blocks = -(-num_elements // self.block)
        return _WORD_BYTES * (blocks + -(-data_bytes // _WORD_BYTES))

    def encode_with_feedback_(
        self, residual: torch.Tensor, wire: torch.Tensor, *, values: torch.Tensor | None = None
    ) -> None:
        """Quantise residual + values to the wire; keep in the residual what that took away."""
        size = residual.numel()
        scales, data = self._parts(wire, size)
        data[self._data_bytes(size) :].zero_()
        maxima = torch.empty(scales.numel(), dtype=torch.float32, device=residual.device)
        scratch = _scratch(residual)
        for start, stop, width in _pieces(residual, block=self.block):
            piece = residual[start:stop]
            if values is not None:
                piece.add_(values[start:stop])
            magnitudes = torch.abs(piece, out=scratch[: stop - start]).view(-1, width)
            torch.amax(magnitudes, dim=1, out=maxima[start // self.block :][: len(magnitudes)])
        exact, divisor, all_finite = _make_scales(maxima, scales, largest=self._largest)
        for start, stop, width in _pieces(residual, block=self.block):
            rows = residual[start:stop].view(-1, width)
            integers = scratch[: stop - start].view(-1, width)
            torch.div(rows, divisor[start // self.block :][: len(rows)], out=integers).round_()
            rows.addcmul_(integers, exact[start // self.block :][: len(rows)], value=-1.0)
            self._pack(integers, data[self._data_bytes(start) : self._data_bytes(stop)])
        if not all_finite:
            torch.nan_to_num_(residual, nan=0.0, posinf=0.0, neginf=0.0)

    def decode_(self, wire: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> None:
        """Write s times the integers to ``out``, or add them."""
        scales, data = self._parts(wire, out.numel())
        exact = scales.float()[:, None]
        scratch = _scratch(out)
        for start, stop, width in _pieces(out, block=self.block):
            rows = out[start:stop].view(-1, width)
            integers = scratch[: stop - start].view(-1, width)
            self._unpack(data[self._data_bytes(start) : self._data_bytes(stop)], integers)
            scale = exact[start // self.block :][: rows.shape[0]]
            if accumulate:
                rows.addcmul_(integers, scale)  # the product is exact: fused or not, the same sum
            else:
                torch.mul(integers, scale, out=rows)

    @property
    def _largest(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    def _data_bytes(self, num_elements: int) -> int:
        return -(-num_elements * self.bits // 8)

    def _parts(self, wire: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale_bytes = _WORD_BYTES * -(-num_elements // self.block)
        return wire[:scale_bytes].view(torch.bfloat16), wire[scale_bytes:]

    def _pack(self, integers: torch.Tensor, data: torch.Tensor) -> None:
        rows, width = integers.shape
        if self.bits == 8:
            data.view(torch.int8).view(rows, width).copy_(integers)
            return
        half = -(-width // 2)
        low, high = integers[:, :half], integers[:, half:]
        low.add_(8.0 + 16 * 8.0)  # both offsets at once: low + 8 + 16 * (high + 8)
        low[:, : width - half].add_(high, alpha=16.0)
        data.view(rows, half).copy_(low)

    def _unpack(self, data: torch.Tensor, integers: torch.Tensor) -> None:
        rows, width = integers.shape
        if self.bits == 8:
            integers.copy_(data.view(torch.int8).view(rows, width))
            return
        half = -(-width // 2)
        codes = data.view(rows, half)
        integers[:, :half].copy_(codes & 15)
        integers[:, half:].copy_(codes[:, : width - half] >> 4)
        integers.sub_(8.0)


@dataclass(frozen=True)
class TopKCodec(Codec):
    """The largest elements of each block, 2 bits and a place each: ``"topk"``.

    Of a block of n elements the k = ceil(density n) largest by magnitude are sent, each as its sign
    and one of two magnitudes a < b: the means of those up to, and of those over, the middle between
    the smallest and the largest of them. The others, and what this took away from the k, stay in
    the residual. With the default, 84 bytes stand for 4096 elements: 1/195 of float32.

    Wire: a and b of all blocks as bfloat16; then for each block the bits of the places
    (``fivefold.optim.codecs``), of the signs and of the magnitudes, filled up to a byte; a
    byte of zero fills the wire up to an even size. Elements of 0 among the k repeat the first
    other one. A magnitude under 2^-126 is sent as 0. If one of the k is not finite, all k elements
    of the block arrive as not-a-number.

    Args:
        density: Share of the elements that are sent, over 0 and at most 1/4.
        block: Elements among which the largest are sought, a power of two from 64 to 32768.
        decay: Factor on the residual before each round; 1 loses nothing, less forgets what has
            waited long.

    Raises:
        ConfigurationError: A value is not allowed.

    References:
        Top-k with 2 bits and decay 0.95: SparseLoCo, arXiv 2508.15706.

    Examples:
        >>> codec = TopKCodec(density=1 / 64)
        >>> codec.encoded_bytes(4096)  # 2 magnitudes of 2 bytes; 64 of 8 + 2 bits
        84
    """

    density: float = 1 / 64
    block: int = 4096
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not (is_number(self.density) and 0 < self.density <= 0.25):
            message = f"density must be over 0 and at most 0.25; got {self.density!r}"
            raise ConfigurationError(message, hint='for more elements use codec="int4"')
        require_whole("block", self.block, least=64, most=_CPU_PIECE_ELEMENTS)
        if self.block.bit_count() != 1:
            message = f"block must be a power of two from 64 to 32768; got {self.block!r}"
            raise ConfigurationError(message, hint="the default is 4096")
        if not (is_number(self.decay) and 0 < self.decay <= 1):
            message = f"decay must be over 0 and at most 1; got {self.decay!r}"
            raise ConfigurationError(message, hint="1 keeps everything, 0.95 is SparseLoCo's")

    @property
    def name(self) -> str:
        """``"topk"``."""
        return "topk"

    @property
    def granule(self) -> int:
        """Slices begin with a block."""
        return self.block

    def encoded_bytes(self, num_elements: int) -> int:
        """Return four bytes per block begun and its bits, filled up to an even number."""
        whole, rest = divmod(num_elements, self.block)
        data_bytes = whole * self._row_bytes(self.block)
        if rest:
            data_bytes += self._row_bytes(rest)
        return 2 * _WORD_BYTES * (whole + bool(rest)) + data_bytes + data_bytes % _WORD_BYTES

    def encode_with_feedback_(
        self, residual: torch.Tensor, wire: torch.Tensor, *, values: torch.Tensor | None = None
    ) -> None:
        """Send the largest of decay * residual + values; keep the rest in the residual."""
        levels, data = self._parts(wire, residual.numel())
        at = 0
        for start, stop, width in _pieces(residual, block=self.block):
            piece = residual[start:stop]
            if self.decay != 1.0:
                piece.mul_(self.decay)
            if values is not None:
                piece.add_(values[start:stop])
            rows = piece.view(-1, width)
            places = torch.topk(rows.abs(), self._count(width), dim=1, sorted=False).indices
            places = places.sort(dim=1).values
            chosen = rows.gather(1, places)
            upper, exact = _two_levels(chosen.abs(), levels[start // self.block :][: len(rows)])
            decoded = torch.where(upper, exact[:, 1:], exact[:, :1]).copysign_(chosen)
            decoded.masked_fill_(chosen.abs() < _SMALLEST_SCALE, 0.0)
            rows.scatter_add_(1, places, -decoded)
            torch.nan_to_num_(rows, nan=0.0, posinf=0.0, neginf=0.0)
            size = len(rows) * self._row_bytes(width)
            packed = data[at : at + size].view(len(rows), -1)
            packed.copy_(_pack_entries(places, decoded, upper, width))
            at += size
        data[at:].zero_()

    def decode_(self, wire: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> None:
        """Write the sent elements to ``out``, and 0 elsewhere, or add them."""
        levels, data = self._parts(wire, out.numel())
        at = 0
        for start, stop, width in _pieces(out, block=self.block):
            count, rows = self._count(width), out[start:stop].view(-1, width)
            size = len(rows) * self._row_bytes(width)
            num_bits = index_bits(width, count)
            bits = unpack_bits(data[at : at + size].view(len(rows), -1), num_bits + 2 * count)
            at += size
            places = read_indices(bits[:, :num_bits], width=width, count=count)
            negative, upper = bits[:, num_bits : num_bits + count], bits[:, num_bits + count :]
            exact = levels[start // self.block :][: len(rows)].float()
            numbers = torch.where(upper.bool(), exact[:, 1:], exact[:, :1])
            numbers = torch.where(negative.bool(), -numbers, numbers)
            # Repeated places hold the same number, so their order does not matter.
            whole = torch.zeros_like(rows) if accumulate else rows.zero_()
            whole.scatter_(1, places, numbers)
            if accumulate:
                rows.add_(whole)

    def _count(self, width: int) -> int:
        return max(1, math.ceil(width * self.density))

    def _row_bytes(self, width: int) -> int:
        count = self._count(width)
        return -(-(index_bits(width, count) + 2 * count) // 8)

    def _parts(self, wire: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        level_bytes = 2 * _WORD_BYTES * -(-num_elements // self.block)
        return wire[:level_bytes].view(torch.bfloat16).view(-1, 2), wire[level_bytes:]


_NAMED: dict[str, Codec] = {
    "fp32": CastCodec(torch.float32),
    "bf16": CastCodec(torch.bfloat16),
    "fp16": CastCodec(torch.float16),
    "int8": BlockCodec(bits=8, block=256),
    "int4": BlockCodec(bits=4, block=128),
    "topk": TopKCodec(),
}
CODEC_NAMES = tuple(_NAMED)


def named_codec(name: str) -> Codec:
    """Return the codec of a name."""
    require_one_of(name, _NAMED, f"there is no codec named {name!r}")
    return _NAMED[name]


def resolve_codec(codec: str | Codec) -> Codec:
    """Return the codec that an argument means: a name, or a codec as it is."""
    if isinstance(codec, str):
        return named_codec(codec)
    if not isinstance(codec, Codec) or isinstance(codec, type):
        message = f"codec must be a name or a codec; got {codec!r}"
        raise ConfigurationError(message, hint=f"names are {', '.join(_NAMED)}")
    return codec


def _make_scales(
    maxima: torch.Tensor, scales: torch.Tensor, *, largest: int
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Fill the wire's scales from the blocks' greatest magnitudes, which are overwritten."""
    # A GPU is not asked: the answer would make the host wait for it.
    all_finite = not maxima.is_cuda and bool((maxima < _LARGEST_SAFE).all())
    scale = maxima.div_(largest)
    scale.masked_fill_(scale < _SMALLEST_SCALE, 0.0)
    scale.add_(scale * 0.0)  # an infinity becomes not-a-number, and with it the whole block
    scales.copy_(scale)
    exact = scales.float()[:, None]
    # Rounding the scale down takes at most 2^-8 of it: |x / s| <= Q (1 + 2^-8) < Q + 1/2, so no
    # integer can leave its range.
    return exact, exact.masked_fill(exact == 0.0, 1.0), all_finite


def _two_levels(
    magnitudes: torch.Tensor, levels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write each row's two magnitudes to ``levels``; return who has the second, and both."""
    there = ~(magnitudes < _SMALLEST_SCALE)  # not-a-number is there
    smallest = magnitudes.masked_fill(~there, torch.inf).amin(dim=1, keepdim=True)
    middle = 0.5 * smallest + 0.5 * magnitudes.amax(dim=1, keepdim=True)
    upper = magnitudes > middle
    means = [
        (magnitudes / mask.sum(dim=1, keepdim=True).clamp_(min=1) * mask).sum(dim=1)
        for mask in (~upper & there, upper)
    ]
    found = torch.stack(means, dim=1)
    found.masked_fill_(~magnitudes.isfinite().all(dim=1, keepdim=True), torch.nan)
    levels.copy_(found)
    same = levels[:, 1] == levels[:, 0]  # so that decoded numbers encode to the same bytes
    levels[:, 1].masked_fill_(same, 0.0)
    return upper & ~same[:, None], levels.float()


def _pack_entries(
    places: torch.Tensor, decoded: torch.Tensor, upper: torch.Tensor, width: int
) -> torch.Tensor:
    """Return the bytes of the rows' entries; those of 0 repeat the first other one."""
    there = decoded != 0
    first = places.masked_fill(~there, width).argmin(dim=1, keepdim=True)
    codes = torch.signbit(decoded).to(torch.int64) + 2 * upper.to(torch.int64)
    none = ~there.any(dim=1, keepdim=True)
    places = torch.where(there, places, places.gather(1, first).masked_fill(none, 0))
    codes = torch.where(there, codes, codes.gather(1, first).masked_fill(none, 0))
    places, order = places.sort(dim=1, stable=True)
    codes = codes.gather(1, order).to(torch.uint8)
    return pack_bits(torch.cat([write_indices(places, width), codes & 1, codes >> 1], dim=1))


def _scratch(like: torch.Tensor) -> torch.Tensor:
    size = like.numel() if like.device.type != "cpu" else min(like.numel(), _CPU_PIECE_ELEMENTS)
    return torch.empty(size, dtype=torch.float32, device=like.device)


def _pieces(values: torch.Tensor, *, block: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, width): runs of whole blocks, then what is left as one short block."""
    size = values.numel()
    whole = size // block * block
    longest = whole if values.device.type != "cpu" else _CPU_PIECE_ELEMENTS // block * block
    for start in range(0, whole, max(longest, 1)):
        yield start, min(start + longest, whole), block
    if whole < size:
        yield whole, size, size - whole


def index_bits(width: int, count: int) -> int:
    """Return the bits of ``count`` indices below ``width``, near the fewest."""
    # Elias, J. ACM 21 (1974): of k ascending indices below n, the l = log2(n / k) lowest bits stand
    # as they are; the rest grows slowly, and is written as a bitmap in which the i-th index sets
    # bit (index >> l) + i. All ranks know the size. An index may stand there several times.
    low = _low_bits(width, count)
    return count * low + count + ((width - 1) >> low)


def write_indices(indices: torch.Tensor, width: int) -> torch.Tensor:
    """Return the bits, uint8 [rows, index_bits] of 0 and 1, of ascending indices [rows, k]."""
    rows, count = indices.shape
    low = _low_bits(width, count)
    shifts = torch.arange(low, device=indices.device)
    lowest = ((indices.unsqueeze(2) >> shifts) & 1).to(torch.uint8).view(rows, count * low)
    size = count + ((width - 1) >> low)
    bitmap = torch.zeros((rows, size), dtype=torch.uint8, device=indices.device)
    places = (indices >> low) + torch.arange(count, device=indices.device)
    return torch.cat([lowest, bitmap.scatter_(1, places, 1)], dim=1)


def read_indices(bits: torch.Tensor, *, width: int, count: int) -> torch.Tensor:
    """Return every row's indices."""
    rows = bits.shape[0]
    low = _low_bits(width, count)
    weights = 1 << torch.arange(low, device=bits.device)
    lowest = (bits[:, : count * low].view(rows, count, low) * weights).sum(dim=2)
    bitmap = bits[:, count * low :]
    # A stable sort puts the set bits first, in their order: the places, without asking a GPU.
    places = torch.sort(bitmap, dim=1, descending=True, stable=True).indices[:, :count]
    highest = places - torch.arange(count, device=bits.device)
    return (highest << low) + lowest


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return uint8 [rows, ceil(n / 8)] of the bits [rows, n], the first one lowest."""
    rows, size = bits.shape
    whole = torch.nn.functional.pad(bits, (0, -size % 8)).view(rows, -1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (whole << shifts).sum(dim=2, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, size: int) -> torch.Tensor:
    """Return the bits [rows, size] that ``pack_bits`` packed."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(2) >> shifts) & 1
    return bits.view(packed.shape[0], -1)[:, :size]


def _low_bits(width: int, count: int) -> int:
    return (width // count).bit_length() - 1
