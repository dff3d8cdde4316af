"""``python -m fivefold.network.aggregation``: a switch process, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict
from typing import get_args

from fivefold.errors import FivefoldError
from fivefold.network.aggregation._switch import AggregationSwitch
from fivefold.network.aggregation.pool import Sharing
from fivefold.units import parse_bytes, parse_duration_s


def main(arguments: list[str] | None = None) -> int:
    """Serve; writes the address as one line of JSON when it is ready, its counts at the end."""
    given = _parser().parse_args(arguments)
    try:
        switch = AggregationSwitch(
            given.host,
            given.port,
            slots=given.slots,
            slot_bytes=parse_bytes(given.slot_bytes),
            sharing=given.sharing,
            expire_s=parse_duration_s(given.expire),
        )
    except FivefoldError as error:
        sys.stderr.write(f"error: {error.message}\n")
        if error.hint is not None:
            sys.stderr.write(f"hint: {error.hint}\n")
        return error.exit_code
    with switch:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: switch.stop())
        _say({"address": switch.address})
        switch.serve()
        _say(asdict(switch.state()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fivefold.network.aggregation",
        description="A software switch that sums chunks of all-reduces; trusted networks only.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port; 0 takes a free one (0)")
    parser.add_argument("--slots", type=int, default=128, help="chunks in work at a time (128)")
    parser.add_argument("--slot-bytes", default="64KiB", help="longest chunk (64KiB)")
    parser.add_argument(
        "--sharing", default="dynamic", choices=get_args(Sharing), help="of the slots (dynamic)"
    )
    parser.add_argument("--expire", default="30s", help="longest wait for parts of a chunk (30s)")
    return parser


def _say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
