"""``fivefold explain``: which of the five layers limits a run, and what each change would bring."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli._options import JsonOption, write_json


def explain_command(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|JOB|JOBS",
            help="Folder of a run, or a TOML file of one job (model) or several (\\[\\[jobs]]).",
            exists=True,
        ),
    ],
    *,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE|TOPOLOGY",
            help="Of a job: a known GPU and its software, such as h100-nemo, or a TOML file. Of "
            "several jobs: a network, such as fat_tree:4,gpus=2.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Of several jobs: the plan.json that simulate wrote; left out, today's practice.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say which of the five layers limits a run, by how much, and what to change.

    Every line is the prediction with one change made: another split, more overlap, a better
    collective, an idle or a crowded network, links twice as fast. Savings do not add up. A finished
    run is explained by its own measurements.

    Examples:
        $ fivefold explain job.toml --cluster h100-nemo
    """
    from fivefold.cli._explain_work import explanation_of, show_explanation

    found = explanation_of(what, cluster, plan)
    if as_json:
        write_json(dataclasses.asdict(found) | {"limit": found.limit})
    else:
        show_explanation(found)
