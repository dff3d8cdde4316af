"""Payload codecs against a slow reference of their definition, and the properties they promise."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fivefold.errors import ConfigurationError
from fivefold.optim.codecs import (
    BlockCodec,
    CastCodec,
    Codec,
    TopKCodec,
    index_bits,
    named_codec,
    pack_bits,
    read_indices,
    unpack_bits,
    write_indices,
)

NAMES = ["fp32", "bf16", "fp16", "int8", "int4", "topk"]
BLOCK_CODECS = [
    BlockCodec(bits=8, block=256),
    BlockCodec(bits=4, block=128),
    BlockCodec(bits=8, block=16),
    BlockCodec(bits=4, block=16),
]
TOP_K_CODECS = [TopKCodec(), TopKCodec(density=0.1, block=64), TopKCodec(density=1 / 7, block=256)]
ALL_CODECS = [*(named_codec(name) for name in NAMES), *BLOCK_CODECS[2:], *TOP_K_CODECS[1:]]


def label(codec):
    return f"{codec.name} {getattr(codec, 'block', '')}"


any_size = st.one_of(st.integers(0, 40), st.integers(240, 280), st.integers(500, 1100))


def float_arrays(largest):
    numbers = st.floats(-largest, largest, width=32)
    return any_size.flatmap(lambda n: hnp.arrays(np.float32, n, elements=numbers, fill=numbers))


def spread_values(size, *, seed=0):
    """Blocks of very different magnitudes, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-30, 20, (size // 64 + 1,), generator=generator)
    magnitude = torch.exp2(exponents.float()).repeat_interleave(64)[:size]
    values = torch.randn(size, generator=generator) * magnitude
    return values * (torch.rand(size, generator=generator) > 0.1)


# -- the definition, element by element ---------------------------------------------------------


def bfloat16_bits(number):
    """Round a float32 to nearest bfloat16, ties to even; its upper 16 bits."""
    bits = struct.unpack("<I", struct.pack("<f", number))[0]
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def reference_wire(values, *, bits, block):
    largest = 2 ** (bits - 1) - 1
    scales, data = b"", bytearray()
    for start in range(0, len(values), block):
        numbers = [np.float32(v) for v in values[start : start + block]]
        scale = max(abs(v) for v in numbers) / np.float32(largest)
        word = bfloat16_bits(scale) if scale >= 2.0**-126 else 0
        scales += struct.pack("<H", word)
        rounded = np.float32(struct.unpack("<f", struct.pack("<I", word << 16))[0])
        integers = [int(np.rint(v / rounded)) if word else 0 for v in numbers]
        assert all(abs(q) <= largest for q in integers)
        if bits == 8:
            data += struct.pack(f"{len(integers)}b", *integers)
            continue
        half = math.ceil(len(integers) / 2)
        high = [q + 8 for q in integers[half:]] + [8] * (2 * half - len(integers))
        data += bytes((low + 8) | (h << 4) for low, h in zip(integers[:half], high, strict=True))
    return scales + bytes(data) + b"\0" * (len(data) % 2)


def reference_values(wire, count, *, bits, block):
    num_blocks = math.ceil(count / block)
    words = struct.unpack(f"<{num_blocks}H", wire[: 2 * num_blocks])
    data, values = wire[2 * num_blocks :], []
    for index, word in enumerate(words):
        scale = np.float32(struct.unpack("<f", struct.pack("<I", word << 16))[0])
        width = min(block, count - index * block)
        if bits == 8:
            integers = struct.unpack(f"{width}b", data[:width])
            data = data[width:]
        else:
            half = math.ceil(width / 2)
            codes = [b & 15 for b in data[:half]] + [b >> 4 for b in data[: width - half]]
            integers, data = [c - 8 for c in codes], data[half:]
        values += [np.float32(q) * scale for q in integers]
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize("codec", BLOCK_CODECS, ids=label)
@pytest.mark.parametrize("size", [0, 1, 2, 15, 16, 17, 255, 256, 257, 1000, 4099])
def test_block_codecs_write_the_bytes_of_the_definition(codec, size):
    values = spread_values(size, seed=size)
    wire = bytes(codec.encode(values).tolist())
    expected = reference_wire(values.tolist(), bits=codec.bits, block=codec.block)
    assert wire == expected
    decoded = codec.decode(codec.encode(values), size).numpy()
    back = reference_values(expected, size, bits=codec.bits, block=codec.block)
    assert np.array_equal(decoded, back)


@pytest.mark.parametrize("codec", BLOCK_CODECS[:2], ids=label)
def test_long_payloads_are_their_parts_one_after_the_other(codec):
    """Over the borders of the pieces in which a CPU works."""
    size = 3 * 32768 + 777
    values = spread_values(size)
    cut = codec.granule * 130
    decoded = codec.decode(codec.encode(values), size)
    for start in range(0, size, cut):
        part = values[start : start + cut]
        expected = codec.decode(codec.encode(part), part.numel())
        assert torch.equal(decoded[start : start + cut], expected)


@given(values=float_arrays(2.0**100), cut=st.integers(0, 70))
@pytest.mark.parametrize("codec", ALL_CODECS, ids=label)
def test_a_cut_at_a_granule_changes_nothing(codec, values, cut):
    values = torch.from_numpy(values)
    at = min(cut * codec.granule, values.numel())
    parts = [codec.decode(codec.encode(part), part.numel()) for part in (values[:at], values[at:])]
    assert torch.equal(torch.cat(parts), codec.decode(codec.encode(values), values.numel()))


# -- sizes and errors ---------------------------------------------------------------------------


@given(size=st.integers(0, 3000))
@pytest.mark.parametrize("codec", ALL_CODECS, ids=label)
def test_the_size_is_the_formulas(codec, size):
    wire = codec.encode(torch.ones(size))
    assert wire.dtype == torch.uint8
    assert wire.numel() == codec.encoded_bytes(size)
    if isinstance(codec, TopKCodec):
        widths = [codec.block] * (size // codec.block) + [size % codec.block] * (
            size % codec.block > 0
        )
        counts = [math.ceil(n * codec.density) for n in widths]
        lows = [math.floor(math.log2(n // k)) for n, k in zip(widths, counts, strict=True)]
        entries = [
            math.ceil((k * (2 + low + 1) + ((n - 1) >> low)) / 8)
            for n, k, low in zip(widths, counts, lows, strict=True)
        ]
        data = sum(entries)
        assert codec.encoded_bytes(size) == 4 * len(widths) + data + data % 2
        return
    bits = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4}[codec.name]
    scales = 2 * math.ceil(size / codec.block) if isinstance(codec, BlockCodec) else 0
    data = math.ceil(size * bits / 8)
    assert codec.encoded_bytes(size) == scales + data + data % 2


@given(values=float_arrays(2.0**100))
@pytest.mark.parametrize("codec", BLOCK_CODECS, ids=label)
def test_block_error_is_half_a_step(codec, values):
    decoded = codec.decode(codec.encode(torch.from_numpy(values)), len(values)).double().numpy()
    largest = 2 ** (codec.bits - 1) - 1
    for start in range(0, len(values), codec.block):
        block = values[start : start + codec.block].astype(np.float64)
        bound = np.abs(block).max() / largest / 2 * (1 + 2.0**-8)
        if np.abs(block).max() / largest < 2.0**-125:  # sent as zeros
            bound = np.abs(block).max()
        assert np.abs(decoded[start : start + codec.block] - block).max() <= bound


@given(values=float_arrays(60000.0))
@pytest.mark.parametrize(
    ("name", "half_ulp", "least"), [("bf16", 2.0**-8, 2.0**-134), ("fp16", 2.0**-11, 2.0**-25)]
)
def test_cast_error_is_half_a_unit_in_the_last_place(name, half_ulp, least, values):
    codec = named_codec(name)
    decoded = codec.decode(codec.encode(torch.from_numpy(values)), len(values)).double().numpy()
    exact = values.astype(np.float64)
    assert (np.abs(decoded - exact) <= np.maximum(half_ulp * np.abs(exact), least)).all()


@given(values=float_arrays(2.0**100))
@pytest.mark.parametrize("codec", ALL_CODECS, ids=label)
def test_decoded_numbers_encode_to_the_same_bytes(codec, values):
    wire = codec.encode(torch.from_numpy(values))
    decoded = codec.decode(wire, len(values))
    if not torch.isfinite(decoded).all():  # float16 of large numbers
        assert codec.name == "fp16"
        return
    again = codec.encode(decoded)
    assert torch.equal(codec.decode(again, len(values)), decoded)
    # Bytes too, but for float formats' two zeros.
    assert isinstance(codec, CastCodec) or torch.equal(again, wire)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-7, 1e3, 1e30])
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_tiny_and_huge_payloads_keep_their_relative_error(name, magnitude):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(5000, generator=generator) * magnitude
    decoded = named_codec(name).decode(named_codec(name).encode(values), 5000)
    error = (decoded.double() - values.double()).norm() / values.double().norm()
    assert error < {"fp32": 1e-9, "bf16": 0.003, "int8": 0.01, "int4": 0.15}[name]


@pytest.mark.parametrize("codec", ALL_CODECS, ids=label)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_travel_and_leave_no_residual(codec, bad):
    values = torch.ones(600)
    values[300] = bad
    residual = torch.zeros(600)
    wire = torch.empty(codec.encoded_bytes(600), dtype=torch.uint8)
    codec.encode_with_feedback_(residual, wire, values=values)
    decoded = codec.decode(wire, 600)
    assert not torch.isfinite(decoded[300])
    assert torch.isfinite(decoded[:256]).all()  # another block
    assert torch.isfinite(residual).all()


def test_float16_overflows_to_infinity():
    codec = named_codec("fp16")
    assert codec.decode(codec.encode(torch.tensor([1e5, -1e5])), 2).tolist() == [
        math.inf,
        -math.inf,
    ]


@pytest.mark.parametrize("codec", ALL_CODECS, ids=label)
def test_zeros_are_zeros(codec):
    assert torch.equal(codec.decode(codec.encode(torch.zeros(1000)), 1000), torch.zeros(1000))


@pytest.mark.parametrize("codec", BLOCK_CODECS, ids=label)
def test_no_integer_leaves_its_range_when_the_scale_is_rounded_down(codec):
    """The worst case: max |x| / Q lies halfway between two bfloat16 numbers."""
    largest = 2 ** (codec.bits - 1) - 1
    values = torch.tensor([1.0, -1.0, 0.0]) * largest * (1 + 2.0**-8)
    assert codec.decode(codec.encode(values), 3).tolist() == [largest, -largest, 0.0]


# -- the largest of each block ------------------------------------------------------------------


def reference_top_k(values, codec):
    """What arrives, one block and one element at a time."""
    arrived = np.zeros_like(values)
    for start in range(0, len(values), codec.block):
        block = values[start : start + codec.block]
        count = max(1, math.ceil(len(block) * codec.density))
        order = sorted(range(len(block)), key=lambda place: -abs(block[place]))[:count]
        chosen = [place for place in order if abs(block[place]) >= 2.0**-126]
        if not chosen:
            continue
        sizes = [abs(float(block[place])) for place in chosen]
        middle = (min(sizes) + max(sizes)) / 2
        for members in (
            [place for place in chosen if abs(block[place]) <= middle],
            [place for place in chosen if abs(block[place]) > middle],
        ):
            mean = sum(abs(float(block[place])) for place in members) / max(len(members), 1)
            level = float(torch.tensor(mean, dtype=torch.float32).bfloat16())
            for place in members:
                arrived[start + place] = math.copysign(level, block[place])
    return arrived


@pytest.mark.parametrize("codec", TOP_K_CODECS, ids=label)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 700, 4097, 40000])
@pytest.mark.parametrize("shape", ["normal", "one element", "heavy tail"])
def test_the_largest_arrive_as_the_definition_says(codec, size, shape):
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator)
    if shape == "one element":
        values = torch.zeros(size).index_fill_(0, torch.tensor([size // 2]), -3.0)
    if shape == "heavy tail":
        values = values**7 * 1e-9
    decoded = codec.decode(codec.encode(values), size).numpy()
    expected = reference_top_k(values.numpy(), codec)
    # A mean in float32 may round to the bfloat16 beside it.
    assert np.allclose(decoded, expected, rtol=2.0**-7, atol=0)
    assert np.array_equal(decoded != 0, expected != 0)


def test_places_come_back_as_they_were_written():
    generator = torch.Generator().manual_seed(0)
    for width, count in [(1, 1), (2, 1), (7, 3), (64, 16), (100, 1), (4096, 64), (4095, 1000)]:
        places = torch.randint(width, (50, count), generator=generator).sort(dim=1).values
        bits = write_indices(places, width)
        assert bits.shape == (50, index_bits(width, count))
        packed = unpack_bits(pack_bits(bits), bits.shape[1])
        assert torch.equal(read_indices(packed, width=width, count=count), places)


def test_what_waits_is_forgotten_at_the_rate_of_the_decay():
    codec = TopKCodec(density=0.01, block=128, decay=0.5)
    values = torch.full((100,), 1e-3)
    values[7] = 1.0
    residual = torch.zeros(100)
    wire = torch.empty(codec.encoded_bytes(100), dtype=torch.uint8)
    for _ in range(4):
        codec.encode_with_feedback_(residual, wire, values=values)
        values[values != 1.0] = 0.0
    assert torch.allclose(residual[8:], torch.full((92,), 1e-3 * 0.5**3))


# -- error feedback -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ALL_CODECS, ids=label)
@pytest.mark.parametrize("size", [1, 257, 70001])
def test_feedback_keeps_exactly_what_the_wire_does_not_hold(codec, size):
    values, residual = spread_values(size, seed=1), spread_values(size, seed=2) * 1e-3
    total = residual + values
    wire = torch.empty(codec.encoded_bytes(size), dtype=torch.uint8)
    kept = values.clone()
    codec.encode_with_feedback_(residual, wire, values=values)
    assert torch.equal(values, kept)
    assert torch.equal(wire, codec.encode(total))
    decoded = codec.decode(wire, size)
    expected = torch.nan_to_num(total - decoded, nan=0.0, posinf=0.0, neginf=0.0)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("codec", ALL_CODECS, ids=label)
def test_messages_and_residual_telescope_to_the_inputs(codec):
    size, rounds = 700, 300
    residual = torch.zeros(size)
    wire = torch.empty(codec.encoded_bytes(size), dtype=torch.uint8)
    received = torch.zeros(size, dtype=torch.float64)
    sent = torch.zeros(size, dtype=torch.float64)
    for index in range(rounds):
        generator = torch.Generator().manual_seed(index)
        values = (torch.randn(size, generator=generator) + 0.01) * 1e-5
        sent += values
        codec.encode_with_feedback_(residual, wire, values=values)
        received += codec.decode(wire, size)
    largest = 1e-5 * 5 * 2
    rounding = rounds * largest * 2.0**-24
    assert (received + residual - sent).abs().max() <= rounding


@pytest.mark.parametrize("codec", ALL_CODECS, ids=label)
def test_accumulating_adds_the_decoded_numbers(codec):
    values, base = spread_values(33000), spread_values(33000, seed=9)
    wire = codec.encode(values)
    out = base.clone()
    codec.decode_(wire, out, accumulate=True)
    assert torch.equal(out, base + codec.decode(wire, 33000))


# -- what is not allowed ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_codecs_have_names(name):
    codec = named_codec(name)
    assert codec.name == name
    assert isinstance(codec, Codec)
    assert hash(codec) == hash(named_codec(name))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: named_codec("int2"), "no codec named 'int2'"),
        (lambda: BlockCodec(bits=3), "bits must be 4 or 8; got 3"),
        (lambda: TopKCodec(density=0.0), "density must be"),
        (lambda: TopKCodec(density=0.5), "density must be"),
        (lambda: TopKCodec(block=100), "block must be a power of two"),
        (lambda: TopKCodec(decay=1.5), "decay must be"),
        (lambda: BlockCodec(block=24), "block must be a multiple of 16"),
        (lambda: BlockCodec(block=0), "block must be a whole number from 16"),
        (lambda: BlockCodec(block=65536), "block must be a whole number from 16 to 32,768"),
        (lambda: CastCodec(torch.float64), r"float32, torch\.bfloat16, torch\.float16; got"),
        (lambda: named_codec("int8").encode(torch.ones(3).double()), "flat float32"),
        (lambda: named_codec("bf16").encode(torch.ones(3, 3)), "flat float32"),
        (lambda: named_codec("int8").decode(torch.zeros(5, dtype=torch.uint8), 9), "does not hold"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
