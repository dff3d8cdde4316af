"""Random networks for properties: a ring of ranks and switches, both ways round, and shortcuts."""

from hypothesis import strategies as st

from fivefold.network.topology import Link, Node, Topology


@st.composite
def looped_networks(draw, *, most_ranks=4, rates=(1.0, 2.0, 5.0), latencies_s=(0.0,), most_links=1):
    """Connected and lopsided, with up to two switches and parallel links."""
    ranks, switches = draw(st.integers(2, most_ranks)), draw(st.integers(0, 2))
    names = [f"g{number}" for number in range(ranks)] + [f"s{number}" for number in range(switches)]
    nodes = [Node(name, "gpu" if name[0] == "g" else "switch") for name in names]
    pairs = [(place, (place + 1) % len(names)) for place in range(len(names))]
    pairs += [(second, first) for first, second in pairs]
    pairs += draw(st.lists(st.tuples(*[st.integers(0, len(names) - 1)] * 2), max_size=4))
    links = [
        Link(
            names[first],
            names[second],
            bandwidth_bytes_per_s=draw(st.sampled_from(rates)),
            latency_s=draw(st.sampled_from(latencies_s)),
            count=draw(st.integers(1, most_links)),
        )
        for first, second in pairs
        if first != second
    ]
    return Topology("random", nodes, links)
