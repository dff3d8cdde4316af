"""Compare two runs from code: read their folders, print the table, write the page.

The runs are written here, so that the example stands alone; a real program names the folders
that ``fivefold train`` wrote.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from fivefold.report import build_report, print_page, report_page, report_text, write_html


def write_example_run(folder: Path, *, method: str, label: str, step_s: float) -> None:
    """Write the least that a run's folder holds: manifest and metrics."""
    folder.mkdir(parents=True)
    manifest = {
        "schema": 1,
        "fivefold": "0.1.0",
        "method": method,
        "label": label,
        "world_size": 2,
        "command": ["fivefold", "train", f"{method}.toml"],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    lines = [
        {
            "event": "validation",
            "step": step,
            "tokens": 2048 * step,
            "wall_s": step_s * step,
            "bits_per_byte": 2.0 + 40.0 / step,
        }
        for step in range(20, 101, 20)
    ]
    end = {"event": "end", "step": 100, "tokens": 204_800, "wall_s": 100 * step_s}
    lines.append(end | {"reason": "finished"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    """Write two runs and compare them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_example_run(folder / "ddp", method="ddp", label="DDP", step_s=0.4)
        write_example_run(folder / "co2", method="co2", label="CO2 (tau 8)", step_s=0.1)

        report = build_report([folder])
        print_page(report_text(report))

        co2 = report.summaries[-1]
        print(f"speed against DDP: {co2.speed_ratio_to_ddp:.1f}x")  # 4.0x

        page = write_html(report_page(report), folder / "report.html")
        print(f"{page.name}: {page.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
