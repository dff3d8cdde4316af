"""Algorithms by name, as files and the command line spell them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.collectives.algorithms._library import available_algorithms
from fivefold.collectives.algorithms._named import (
    bidirectional_ring,
    binary_tree,
    binomial_tree,
    bruck,
    double_binary_tree,
    one_shot,
    pat,
    recursive_doubling,
    recursive_halving_doubling,
    ring,
)
from fivefold.collectives.algorithms._straight import (
    direct,
    direct_all_to_all,
    hierarchical,
    pairwise_all_to_all,
)
from fivefold.collectives.schedules import Collective, Schedule
from fivefold.errors import ConfigurationError

if TYPE_CHECKING:
    from fivefold.network.topology import Topology

BUILDERS: dict[str, Any] = {
    "ring": ring,
    "bidirectional_ring": bidirectional_ring,
    "binary_tree": binary_tree,
    "double_binary_tree": double_binary_tree,
    "binomial_tree": binomial_tree,
    "recursive_doubling": recursive_doubling,
    "recursive_halving_doubling": recursive_halving_doubling,
    "bruck": bruck,
    "pat": pat,
    "direct": direct,
    "direct_all_to_all": direct_all_to_all,
    "pairwise": pairwise_all_to_all,
    "pairwise_all_to_all": pairwise_all_to_all,
    "one_shot": one_shot,
    "hierarchical": hierarchical,
}


def build_algorithm(
    name: str, collective: Collective, topology: Topology | None = None, **options: Any
) -> Schedule:
    """The schedule of an algorithm of the library, by name.

    Args:
        name: One of `available_algorithms`; hyphens count as underscores.
        collective: What it is to do.
        topology: Network to keep with the schedule; rings and hierarchies also follow it.
        **options: Options of the algorithm's own function, such as ``groups`` or ``radix``.

    Returns:
        The schedule.

    Raises:
        ConfigurationError: There is no such algorithm or option, or it does not do this collective.

    Examples:
        >>> from fivefold.collectives.schedules import all_reduce, verify
        >>> verify(build_algorithm("recursive-halving-doubling", all_reduce(6))).order
        'steps'
    """
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    if plain not in BUILDERS:
        raise ConfigurationError(
            f"there is no algorithm {name!r}",
            hint=f"for {collective.name} there are: "
            + (", ".join(available_algorithms(collective)) or "none"),
        )
    if topology is not None and topology.num_ranks != collective.num_ranks:
        raise ConfigurationError(
            f"the collective has {collective.num_ranks} ranks, the topology {topology.num_ranks}",
            hint="make the collective for topology.num_ranks ranks",
        )
    try:
        schedule: Schedule = BUILDERS[plain](collective, topology, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ConfigurationError(
            f"{plain} has no such option: {error}", hint=f"see help({plain})"
        ) from None
    return schedule
