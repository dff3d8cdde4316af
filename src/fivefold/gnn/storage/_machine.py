"""Machine operations that the compiled kernels of storage share: loads, copies, atomics, libc.

Kernels take plain addresses (``int64``), so that one compilation serves every dtype, read-only
arrays and memory maps alike. The caller keeps the arrays alive and has checked the bounds.
Memory order is stated at every shared word, so the kernels are right on x86 and on arm64.
"""

# ruff: noqa: ARG001 - numba reads the parameters' names and types from the signature
from __future__ import annotations

from typing import Any

from fivefold._compiler import njit, numba

types: Any = numba.types
carray: Any = numba.carray
cgutils: Any = numba.core.cgutils  # numba's own helpers for writing LLVM instructions
intrinsic: Any = numba.extending.intrinsic

#: ``ssize_t pread(int, void *, size_t, off_t)``; the address is passed as a number.
pread: Any = types.ExternalFunction(
    "pread", types.int64(types.int32, types.int64, types.uint64, types.int64)
)
#: ``ssize_t pwrite(int, const void *, size_t, off_t)``.
pwrite: Any = types.ExternalFunction(
    "pwrite", types.int64(types.int32, types.int64, types.uint64, types.int64)
)
#: ``long syscall(long, ...)`` with six arguments, which is how libc passes them on.
syscall: Any = types.ExternalFunction(
    "syscall",
    types.int64(
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
    ),
)
_errno_location: Any = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())


@njit
def read_errno() -> int:
    """Return the error number of the calling thread's last libc call."""
    return carray(_errno_location(), 1)[0]  # type: ignore[no-any-return]


def _pointer(builder: Any, address: Any, bits: int) -> Any:
    return builder.inttoptr(address, cgutils.ir.IntType(bits).as_pointer())


@intrinsic
def load_u64(_typing: Any, address: Any) -> Any:
    """Return eight bytes at any address, aligned or not."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(builder, arguments[0], 64), align=1)

    return types.uint64(types.int64), generate


@intrinsic
def store_u32(_typing: Any, address: Any, value: Any) -> Any:
    """Write four bytes at any address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], _pointer(builder, arguments[0], 32), align=1)

    return types.void(types.int64, types.uint32), generate


@intrinsic
def store_u64(_typing: Any, address: Any, value: Any) -> Any:
    """Write eight bytes at any address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], _pointer(builder, arguments[0], 64), align=1)

    return types.void(types.int64, types.uint64), generate


@intrinsic
def copy_bytes(_typing: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy by ``memcpy``: the two ranges do not overlap."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, origin = (_pointer(builder, value, 8) for value in arguments[:2])
        cgutils.raw_memcpy(builder, to, origin, arguments[2], 1)

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def atomic_add(_typing: Any, address: Any, value: Any) -> Any:
    """Add to a shared ``int64`` and return what it was; no other memory is ordered by it."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw(
            "add", _pointer(builder, arguments[0], 64), arguments[1], "monotonic"
        )

    return types.int64(types.int64, types.int64), generate


@intrinsic
def load_acquire_u32(_typing: Any, address: Any) -> Any:
    """Read a shared word; what its writer stored before it is visible afterwards."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0], 32), "acquire", 4)

    return types.uint32(types.int64), generate


@intrinsic
def store_release_u32(_typing: Any, address: Any, value: Any) -> Any:
    """Write a shared word after everything that was stored before it."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0], 32), "release", 4)

    return types.void(types.int64, types.uint32), generate


@intrinsic
def prefetch(_typing: Any, address: Any) -> Any:
    """Tell the processor that the cache line at this address will be read soon."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = cgutils.ir.IntType(32)
        place = _pointer(builder, arguments[0], 8)
        kind = cgutils.ir.FunctionType(cgutils.ir.VoidType(), [place.type, word, word, word])
        name = "llvm.prefetch.p0" if "*" not in str(place.type) else "llvm.prefetch.p0i8"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [place, word(0), word(3), word(1)])

    return types.void(types.int64), generate
