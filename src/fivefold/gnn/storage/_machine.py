"""Machine operations that the compiled kernels of storage share: loads, copies, atomics, libc.

Kernels take plain addresses (``int64``), so that one compilation serves every dtype, read-only
arrays and memory maps alike. The caller keeps the arrays alive and has checked the bounds.
Memory order is stated at every shared word, so the kernels are right on x86 and on arm64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
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
    types.int64(*[types.int64] * 7),
)
_errno_location: Any = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())


@njit
def read_errno() -> int:
    """Return the error number of the calling thread's last libc call."""
    return carray(_errno_location(), 1)[0]  # type: ignore[no-any-return]


def _pointer(builder: Any, address: Any, bits: int) -> Any:
    return builder.inttoptr(address, cgutils.ir.IntType(bits).as_pointer())


def _operation(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an operation for compiled code of a function that emits its instructions."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return emit(builder, *values)

        @wraps(emit)  # numba counts the parameters
        def typed(*_: Any) -> Any:
            return result(*kinds), generate

        return intrinsic(typed)

    return decorate


@_operation(types.uint64, types.int64)
def load_u64(builder: Any, address: Any) -> Any:
    """Return eight bytes at any address, aligned or not."""
    return builder.load(_pointer(builder, address, 64), align=1)


@_operation(types.void, types.int64, types.uint32)
def store_u32(builder: Any, address: Any, value: Any) -> None:
    """Write four bytes at any address."""
    builder.store(value, _pointer(builder, address, 32), align=1)


@_operation(types.void, types.int64, types.uint64)
def store_u64(builder: Any, address: Any, value: Any) -> None:
    """Write eight bytes at any address."""
    builder.store(value, _pointer(builder, address, 64), align=1)


@_operation(types.void, types.int64, types.int64, types.int64)
def copy_bytes(builder: Any, target: Any, source: Any, count: Any) -> None:
    """Copy by ``memcpy``: the two ranges do not overlap."""
    to, origin = _pointer(builder, target, 8), _pointer(builder, source, 8)
    cgutils.raw_memcpy(builder, to, origin, count, 1)


@_operation(types.int64, types.int64, types.int64)
def atomic_add(builder: Any, address: Any, value: Any) -> Any:
    """Add to a shared ``int64`` and return what it was; no other memory is ordered by it."""
    return builder.atomic_rmw("add", _pointer(builder, address, 64), value, "monotonic")


@_operation(types.uint32, types.int64)
def load_acquire_u32(builder: Any, address: Any) -> Any:
    """Read a shared word; what its writer stored before it is visible afterwards."""
    return builder.load_atomic(_pointer(builder, address, 32), "acquire", 4)


@_operation(types.void, types.int64, types.uint32)
def store_release_u32(builder: Any, address: Any, value: Any) -> None:
    """Write a shared word after everything that was stored before it."""
    builder.store_atomic(value, _pointer(builder, address, 32), "release", 4)


@_operation(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Tell the processor that the cache line at this address will be read soon."""
    word, place = cgutils.ir.IntType(32), _pointer(builder, address, 8)
    kind = cgutils.ir.FunctionType(cgutils.ir.VoidType(), [place.type, word, word, word])
    name = "llvm.prefetch.p0" if "*" not in str(place.type) else "llvm.prefetch.p0i8"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    builder.call(function, [place, word(0), word(3), word(1)])
