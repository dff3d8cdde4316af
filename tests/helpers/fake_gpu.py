"""A GPU that only counts: tensors without contents, and what is asked of them.

``FakeTensorMode`` has tensors on "cuda" without a GPU. Each operation on them stands for a launch;
what hands a value to the host stands for a wait of the host.
"""

import contextlib
import time
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.optim import _flat, _layout
from fivefold.optim._metadata import Metadata, MetadataReading

# Nothing is launched for these: they look at memory in another way, or only reserve it.
_FREE = {
    *("view", "_unsafe_view", "split", "split_with_sizes", "slice", "select", "as_strided", "t"),
    *("detach", "alias", "expand", "unsqueeze", "squeeze", "transpose", "permute", "empty"),
    *("empty_strided", "empty_like", "unbind", "new_empty", "lift_fresh", "is_pinned", "device"),
}


class Counted(TorchDispatchMode):
    """Counts operations on "cuda".

    Attributes:
        launches: Operations that run something on the device, by name.
        waits: Operations for which the host would wait, in order.
        largest_bytes: Of the largest fresh tensor on the device.
    """

    def __init__(self):
        super().__init__()
        self.forget()

    def forget(self):
        """Count from here."""
        self.launches, self.waits, self.largest_bytes = Counter(), [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count, and answer what only contents could: with 1, or yes."""
        del types
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = any(tensor.is_cuda for tensor in given)
        if name in {"_local_scalar_dense", "equal"}:
            if on_device:
                self.waits.append(name)
            return 1.0 if given[0].is_floating_point() and name != "equal" else 1
        found = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        if on_device or any(tensor.is_cuda for tensor in made):
            self._look(name, given, made, hasty=_is_hasty(name, args, kwargs))
        return found

    def _look(self, name, given, made, *, hasty):
        if name not in _FREE:
            self.launches[name] += 1
        ends = [given[-1], *made] if name in {"_to_copy", "copy_"} else []
        if len({tensor.device.type for tensor in ends}) > 1 and not hasty:
            self.waits.append(name)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [tensor.untyped_storage() for tensor in made if tensor.is_cuda]
        sizes = (storage.nbytes() for storage in fresh if storage._cdata not in known)
        self.largest_bytes = max(self.largest_bytes, *sizes, 0)


def _is_hasty(name, args, kwargs):
    return kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])


def _part(tensor, place):
    """Index the first dimension."""
    if isinstance(place, slice):
        start, stop, _ = place.indices(tensor.shape[0])
        return tensor.narrow(0, start, stop - start)
    return tensor.select(0, place)


def _set_part(tensor, place, value):
    put = _copy if isinstance(value, torch.Tensor) else torch.Tensor.fill_
    put(_part(tensor, place), value)


def _reader(kind):
    def read(tensor):
        found = torch.ops.aten._local_scalar_dense(tensor)
        return [found] * tensor.numel() if kind is list else kind(found)

    return read


def _copy(tensor, source, non_blocking=False):  # noqa: FBT002 - torch's own signature
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.copy_(tensor, source, non_blocking)


class Stream:
    """A stream that is told of in ``log``."""

    def __init__(self, log, name="side"):
        self.log, self.name, self.device = log, name, torch.device("cuda", 0)

    def wait_event(self, event):
        """Be ordered behind an event."""
        self.log.append(f"{self.name} waits for {event.of}")

    def wait_stream(self, other):
        """Be ordered behind what another has queued."""
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self):
        """Stop the host."""
        self.log.append(f"host waits for {self.name}")

    def record_event(self):
        """Return an event here."""
        return Event(self.log).record(self)


class Event:
    """An event that has always happened."""

    def __init__(self, log, **_how):
        self.log = log

    def record(self, stream):
        """Remember of which stream it is."""
        self.of = stream.name
        return self

    def query(self):
        """Say that it has happened."""
        return True

    def synchronize(self):
        """Stop the host, where it has not happened yet."""
        self.log.append(f"host waits for an event of {self.of}")

    def elapsed_time(self, _later):
        """Say that nothing takes long."""
        return 1.0


class OneOfTwo:
    """The transport of one rank of two, in which nothing moves."""

    rank, world_size = 0, 2

    def prepare(self, payloads, *, fragment, num_exact=0):
        """Learn nothing."""

    def launch(self, payloads, *, metadata, fragment, what):
        """Start nothing."""
        del payloads, metadata, fragment, what
        now_s = time.perf_counter()
        return SimpleNamespace(
            wait=lambda: True, launched_at_s=now_s, completed_at_s=None, sent_bytes=0
        )

    def broadcast(self, tensors):
        """Move nothing."""

    def gather_objects(self, value):
        """Say that the other says the same."""
        return [value, value]


@contextlib.contextmanager
def fake_gpu(patch):
    """Give a device that counts, its streams and events, and ranks that all say the same.

    Yields the counts; ``log`` of them is what was asked of streams and events.
    """
    counted, log = Counted(), []
    counted.log = log
    current = [Stream(log, "compute")]

    @contextlib.contextmanager
    def entered(stream):
        current.append(stream)
        yield
        current.pop()

    # They lie nowhere, and are of a class of their own.
    patch.setattr(FakeTensor, "data_ptr", lambda self: self.untyped_storage()._cdata, raising=False)
    patch.setattr(FakeTensor, "__getitem__", _part, raising=False)  # torch's own asks the driver
    for kind in (bool, int, float):
        patch.setattr(FakeTensor, f"__{kind.__name__}__", _reader(kind), raising=False)
    patch.setattr(FakeTensor, "tolist", _reader(list), raising=False)
    patch.setattr(FakeTensor, "pin_memory", lambda tensor: tensor, raising=False)
    patch.setattr(FakeTensor, "numpy", lambda tensor: bytes(tensor.numel()), raising=False)
    patch.setattr(FakeTensor, "copy_", _copy, raising=False)
    patch.setattr(FakeTensor, "__setitem__", _set_part, raising=False)
    patch.setattr(_layout, "_require_readable", lambda *_: None)
    patch.setattr(_flat, "_require_dense", lambda *_: None)
    patch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(log))
    patch.setattr(torch.cuda, "Event", lambda **how: Event(log, **how))
    patch.setattr(torch.cuda, "stream", entered)
    patch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    patch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())

    def read(_self):
        names = [each.name for each in fields(MetadataReading)]
        said = {name: [0.0, 0.0] for name in names}
        return MetadataReading(**said | {"weight": [1.0, 1.0]})

    patch.setattr(Metadata, "read", read)
    with FakeTensorMode(), counted:
        yield counted


def parameters_on_gpu(*shapes, dtype=torch.float32):
    """Return a module with parameters of these shapes."""
    module = torch.nn.Module()
    for number, shape in enumerate(shapes):
        tensor = torch.empty(shape, dtype=dtype, device="cuda")
        module.register_parameter(f"p{number}", torch.nn.Parameter(tensor))
    return module
