"""Batches of links for link prediction: edges as seeds, and random pairs that are none."""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike

from fivefold.errors import ConfigurationError, require_whole
from fivefold.gnn.data import Dataset
from fivefold.gnn.data.arrays import as_array
from fivefold.gnn.loading._base import known_options
from fivefold.gnn.loading._sampled import OnlineLoader, part_of
from fivefold.gnn.loading.batch import MiniBatch
from fivefold.gnn.sampling import Adjacency
from fivefold.gnn.sampling.temporal import TemporalSampler
from fivefold.gnn.storage.pages import Array, Ids

Negatives = Literal["binary", "triplet"]
_OF_LINKS = {  # None would mean none of them, where "binary" is the default here
    "input_time": ("edge_label_time", "give one for each link"),
    "ids": ("edge_label_index", "give one for each link"),
    "neg_sampling": ("negatives", 'say negatives="binary", "triplet" or None'),
    "neg_sampling_ratio": (
        "negatives",
        'say negatives="binary" with negatives_per_link=, or negatives=None',
    ),
}


class LinkLoader(OnlineLoader):
    """Sample the neighbourhoods of links, and of random pairs beside them, on the fly.

    It takes the place of PyG's ``LinkNeighborLoader``. The seeds of a batch are the ends of its
    links, each once; ``edge_label_index`` numbers them as rows of the batch. Random pairs are
    drawn from all nodes, with times from those that exist already, and may be links by chance, as
    in PyG.

    Args:
        dataset: Dataset that holds topology and features.
        edge_label_index: ``[2, links]``, sources over targets; None: all edges of the graph, in
            the order of its source.
        fanouts: Neighbours per hop, -1 for all.
        batch_size: Links per batch; random pairs come on top.
        edge_label: Label of each link; None: 1. Where random pairs are added, whose label is 0,
            labels that begin at 0 are raised by one, as in PyG. Where the links are all edges,
            this and ``edge_label_time`` have an entry for each edge of the source: an edge that
            was stored in both directions is two links with one entry, and equal edges of which
            one was kept are one link, with the first one's. They may be names, as ``edge_time``.
        negatives: "binary" adds random pairs with label 0 to ``edge_label_index``; "triplet"
            gives ``src_index``, ``dst_pos_index`` and ``dst_neg_index``; None adds nothing.
        negatives_per_link: How many random pairs (or targets) for each link.
        edge_label_time: ``[links]``, the latest time that each link and its random pairs may see,
            with ``node_time`` or ``edge_time``; both ends of every pair have trees of their own.
            Random pairs are drawn among the nodes that exist then: with ``edge_time`` a node does
            since its first edge.
        options: Those of ``OnlineLoader``: topology, cache_bytes, shuffle, seed, form, rank, ...

    Raises:
        ConfigurationError: A setting is out of range, a link names no node, or labels do not fit.

    Examples:
        >>> import tempfile
        >>> from fivefold.gnn.data import generate_graph
        >>> dataset = generate_graph(tempfile.mkdtemp(), nodes=200, dim=4, seed=0)
        >>> with LinkLoader(dataset, [[1, 2], [3, 4]], fanouts=[3], batch_size=2) as loader:
        ...     batch = next(iter(loader))
        >>> batch.links["edge_label"].tolist(), tuple(batch.links["edge_label_index"].shape)
        ([1.0, 1.0, 0.0, 0.0], (2, 4))
        >>> dataset.close()
    """

    def __init__(  # noqa: PLR0913 - independent options, each with a default
        self,
        dataset: Dataset,
        edge_label_index: ArrayLike | torch.Tensor | None = None,
        *,
        fanouts: Any,
        batch_size: int,
        edge_label: ArrayLike | torch.Tensor | str | None = None,
        negatives: Negatives | None = "binary",
        negatives_per_link: int = 1,
        edge_label_time: ArrayLike | str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(dataset, Dataset):
            message = f"links are of graphs of one type; got a {type(dataset).__name__}"
            raise ConfigurationError(message, hint="open a Dataset")
        for name, (instead, hint) in _OF_LINKS.items():
            if name in options:
                message = f"links have {instead} in place of {name}"
                raise ConfigurationError(message, hint=hint)
        known = inspect.signature(OnlineLoader.__init__).parameters
        options = known_options(options, type(self).__name__, known)
        for name, value in (("edge_label", edge_label), ("edge_label_time", edge_label_time)):
            if isinstance(value, str) and edge_label_index is not None:
                message = f"{name} is a name, {value!r}, but the links are not the graph's edges"
                raise ConfigurationError(message, hint="give one for each link")
        edge_label = part_of(dataset, "edge", edge_label)
        edge_label_time = part_of(dataset, "edge", edge_label_time)
        if options.get("topology") is None:
            options["topology"] = dataset.topology()
        ends, entries = _checked_links(edge_label_index, dataset, options["topology"])
        links = _Links(
            ends,
            entries,
            None if edge_label is None else as_array(edge_label, "edge_label"),
            negatives=negatives,
            ratio=negatives_per_link,
            num_nodes=dataset.num_nodes,
            num_entries=ends.shape[1] if entries is None else options["topology"].num_source_edges,
            seed=options.get("seed", 0),
        )
        super().__init__(dataset, [], fanouts=fanouts, batch_size=batch_size, **options)
        if isinstance(self._sampler, TemporalSampler):
            if edge_label_time is None:
                message = "nodes or edges have times, but edge_label_time is None"
                raise ConfigurationError(message, hint="give one time for each link")
            nobody = np.zeros(links.num_entries, np.int64)
            limits = self._sampler.times_of(nobody, edge_label_time, "edge_label_time")
            links.set_times(limits, self._sampler.born())
        elif edge_label_time is not None:
            message = "edge_label_time needs times of nodes or edges"
            raise ConfigurationError(message, hint="give node_time or edge_time too")
        self._links = links
        self._ids = np.arange(links.ends.shape[1])
        self._numbers(0)  # an impossible rank is refused here and not in the first epoch


def _checked_links(
    given: ArrayLike | torch.Tensor | None, dataset: Dataset, topology: Adjacency
) -> tuple[Ids, Ids | None]:
    """Return the ends of the links, and where each has its entry of what is given per link.

    None is for the first link the first entry, and so on.
    """
    if given is None:
        targets = np.repeat(np.arange(topology.num_nodes), np.diff(topology.indptr))
        ends = np.stack([topology.indices.astype(np.int64), targets])
        entries = topology.numbers_of(np.arange(topology.num_edges))
        order = np.argsort(entries, kind="stable")
        ends, entries = ends[:, order], entries[order]
        in_turn = len(entries) == topology.num_source_edges
        in_turn &= np.array_equal(entries, np.arange(len(entries)))
        return ends, None if in_turn else entries
    ends = as_array(given, "edge_label_index")
    if ends.ndim != 2 or len(ends) != 2 or (ends.size and ends.dtype.kind not in "iu"):
        raise ConfigurationError(
            f"edge_label_index has shape {list(ends.shape)} and dtype {ends.dtype}",
            hint="give integers [2, links], sources over targets",
        )
    if ends.size and not 0 <= int(ends.min()) <= int(ends.max()) < dataset.num_nodes:
        raise ConfigurationError(
            f"links go from node {ends.min()} to {ends.max()}, the graph has "
            f"{dataset.num_nodes} nodes",
            hint="ids of nodes count from 0",
        )
    return ends.astype(np.int64), None


class _Links:
    """Links, and the random pairs of each batch; the same ones whenever they are asked for."""

    def __init__(  # noqa: PLR0913 - what a loader of links was given, all by name
        self,
        ends: Ids,
        entries: Ids | None,
        labels: Array | None,
        *,
        negatives: Negatives | None,
        ratio: int,
        num_nodes: int,
        num_entries: int,
        seed: int,
    ) -> None:
        if negatives not in ("binary", "triplet", None):
            raise ConfigurationError(
                f"negatives is {negatives!r}", hint='use "binary", "triplet" or None'
            )
        require_whole("negatives_per_link", ratio)
        self.num_entries = num_entries
        if labels is not None and (
            len(labels.shape) == 0
            or len(labels) != self.num_entries
            or labels.dtype.kind not in "iufb"
        ):
            raise ConfigurationError(
                f"edge_label has shape {list(labels.shape)} and dtype {labels.dtype} for "
                f"{self.num_entries} links",
                hint="give one number, or one row of numbers, per link",
            )
        if labels is not None and negatives == "triplet":
            message = "links of triplets have no labels, but edge_label was given"
            raise ConfigurationError(message, hint='use negatives="binary"')
        if labels is not None and negatives == "binary" and len(labels) and labels.min() == 0:
            labels = labels + 1
        self.ends, self._labels, self._kind, self._ratio = ends, labels, negatives, ratio
        self._entries = entries
        self._num_nodes, self._seed = num_nodes, seed
        self._drawn_rows = {"binary": 2, "triplet": 1, None: 0}[negatives]
        self.name = f"{zlib.crc32(np.ascontiguousarray(ends).data):08x} {negatives} {ratio}"
        self._times: Array | None = None
        self._by_birth: Ids | None = None  # nodes, the oldest first, and how many a link may see
        self._num_born: Ids | None = None

    def set_times(self, times: Array, born: Array) -> None:
        """Give each link, and its random pairs, a time: every end is a seed of its own then.

        ``times`` has an entry per link, ``born`` says since when each node exists: random pairs
        are drawn among the nodes that exist at their link's time.
        """
        self._times = self._of(times, np.arange(self.ends.shape[1]))
        self.name += f" at {zlib.crc32(times.tobytes()):08x}"
        if not self._drawn_rows:
            return
        self._by_birth = np.argsort(born, kind="stable")
        self._num_born = np.searchsorted(born[self._by_birth], self._times, side="right")
        if (none := np.flatnonzero(self._num_born == 0)).size:
            raise ConfigurationError(
                f"no node exists at {self._times[none[0]]}, the time of link {none[0]}, so that "
                "no random pair can be drawn for it",
                hint="leave such links out, or use negatives=None",
            )

    def _of(self, given: Array, chosen: Ids) -> Array:
        """Return the entries of some links, of what is given for each."""
        return given[chosen if self._entries is None else self._entries[chosen]]

    def times(self, chosen: Ids) -> Array | None:
        """Return the time of each of ``nodes``, or None."""
        if self._times is None:
            return None
        own = self._times[chosen]
        return np.concatenate([own, own, *[np.repeat(own, self._ratio)] * self._drawn_rows])

    def pairs(self, chosen: Ids, *, epoch: int, batch: int) -> tuple[Ids, Ids]:
        """Return the ends [2, links] of a batch, and of random pairs [2 or 1, links * ratio]."""
        key = np.random.SeedSequence((self._seed, epoch, batch, 0x6C696E6B))
        random = np.random.Generator(np.random.Philox(key))
        shape = (self._drawn_rows, len(chosen) * self._ratio)
        if self._by_birth is None or self._num_born is None:
            return self.ends[:, chosen], random.integers(0, self._num_nodes, shape)
        born = np.repeat(self._num_born[chosen], self._ratio)
        return self.ends[:, chosen], self._by_birth[random.integers(0, born, shape)]

    def nodes(self, chosen: Ids, *, epoch: int, batch: int) -> Ids:
        """Return the ends of all pairs: each once, or with times one after another."""
        ends = np.concatenate([p.ravel() for p in self.pairs(chosen, epoch=epoch, batch=batch)])
        return np.unique(ends) if self._times is None else ends

    def add(self, made: MiniBatch, chosen: Ids, *, epoch: int, batch: int) -> MiniBatch:
        """Return the batch with its pairs, numbered as its rows: ``nodes`` come first, in order."""
        pairs = self.pairs(chosen, epoch=epoch, batch=batch)
        seeds = self.nodes(chosen, epoch=epoch, batch=batch)
        if self._times is None:
            places = [np.searchsorted(seeds, part) for part in pairs]
        else:
            parts = np.split(np.arange(len(seeds)), [pairs[0].size])
            places = [part.reshape(pair.shape) for part, pair in zip(parts, pairs, strict=True)]
        ends, random = (torch.from_numpy(part) for part in places)
        links: dict[str, torch.Tensor] = {}
        if self._kind == "triplet":
            links = {"src_index": ends[0], "dst_pos_index": ends[1], "dst_neg_index": random[0]}
            if self._ratio > 1:
                links["dst_neg_index"] = random[0].view(-1, self._ratio)
        else:
            links["edge_label_index"] = ends if self._kind is None else torch.cat([ends, random], 1)
            labels = self._labels_of(chosen, random.shape[1] if self._kind else 0)
            if labels is not None:
                links["edge_label"] = labels
        device, input_id = made.x.device, chosen
        if self._entries is not None:
            input_id = self._entries[chosen]
        return dataclasses.replace(
            made,
            input_id=torch.from_numpy(input_id).to(device),
            links={name: value.to(device) for name, value in links.items()},
        )

    def _labels_of(self, chosen: Ids, extra: int) -> torch.Tensor | None:
        if self._labels is None and self._kind is None:
            return None
        if self._labels is None:
            return torch.cat([torch.ones(len(chosen)), torch.zeros(extra)])
        labels = torch.from_numpy(np.ascontiguousarray(self._of(self._labels, chosen)))
        if self._kind is None:
            return labels
        return torch.cat([labels, labels.new_zeros((extra, *labels.shape[1:]))])
