"""A prediction beside what a run measured, and which constant is named as off."""

import json

import pytest

from fivefold.errors import DataError
from fivefold.report import build_report, report_page, report_text
from fivefold.report._prediction import predicted_runs
from fivefold.report.summary import value_at_time

# DDP of conftest: 0.25 s computation, 0.875 s in flight and 0.5 s waiting a step, 64 steps.
PREDICTION = {
    "cluster": '"lab"', "ranks": 2, "settings": '"x"', "compute_s": 0.25,
    "exposed_communication_s": 0.5, "bubble_s": 0.0, "other_s": 0.0, "all_reduce_s": 0.875,
    "memory_bytes": 3e8,
}  # fmt: skip
CONSTANTS = {
    "device.gemm_efficiency": 0.6, "device.step_overhead_s": 0.01, "device.reserved_bytes": 2e8,
    "tier.cluster.bandwidth_bytes_per_s": 12.5e6, "tier.cluster.efficiency": 0.9,
}  # fmt: skip


def planned(folder, *, name="ddp", **changes):
    run = folder / name
    own = {key: changes.pop(key) for key in list(changes) if key in CONSTANTS}
    tables = [f"{key} = {value}" for key, value in (PREDICTION | changes).items()]
    constants = [f'"{key}" = {value}' for key, value in (CONSTANTS | own).items()]
    text = (run / "config.toml").read_text()
    parts = [text, "[prediction]", *tables, "[prediction.constants]", *constants, ""]
    (run / "config.toml").write_text("\n".join(parts))
    return run


def result(run, **process):
    values = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(values | {"process": process}))


def found_in(folder):
    report = build_report([folder])
    (found,) = predicted_runs(report.runs, report.summaries)
    return {part.name: part for part in found.parts}, " ".join(found.findings)


def test_a_true_prediction_is_said_to_be_true(comparison):
    result(planned(comparison), memory_bytes=310_000_000, waited_for_cpu=0.01)
    parts, words = found_in(comparison)
    assert parts["step"].measured == pytest.approx(0.75)
    assert parts["step"].error == pytest.approx(0.0)
    assert parts["compute"].measured == pytest.approx(0.25)
    assert parts["exposed communication"].measured == pytest.approx(0.5)
    assert "within 10%" in words
    assert "busy" not in words


@pytest.mark.parametrize(
    "changes",
    [{"compute_s": '"fast"'}, {"bubble_s": "[]"}, {"tier.cluster.efficiency": '"a"'}],
)
def test_a_damaged_prediction_is_an_error_that_names_its_file(comparison, changes):
    run = planned(comparison, **changes)
    with pytest.raises(DataError, match=r"ddp/config\.toml is not what a plan writes"):
        build_report([run]).to_json()


@pytest.mark.parametrize(
    "change", [{"process": {"memory_bytes": "much"}}, {"sync": {"rounds": "x"}}]
)
def test_a_damaged_result_is_not_taken_for_a_damaged_prediction(comparison, change):
    run = planned(comparison, name="co2")
    values = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(values | change))
    with pytest.raises(DataError, match=r"result\.json"):
        build_report([run]).to_json()


def test_waits_after_the_last_step_are_in_no_step(comparison):
    run = planned(comparison, exposed_communication_s=0.25)
    values = json.loads((run / "result.json").read_text())
    waits = {"all-reduce": 0.25 * 64, "last all-reduce": 0.25 * 64}
    (run / "result.json").write_text(json.dumps(values | {"waits": waits}))
    parts, words = found_in(comparison)
    assert parts["exposed communication"].measured == pytest.approx(0.25)
    assert parts["step"].measured == pytest.approx(0.5)
    assert parts["step"].error == pytest.approx(0.0)
    assert "all replicas became equal in 16 s" in words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # Compute twice as fast as it was: the efficiency that was assumed is halved.
        ({"compute_s": 0.125}, "gemm_efficiency = 0.6; 0.3 gives"),
        # An exchange in a quarter of its time: so is what the tier was said to reach.
        ({"exposed_communication_s": 0.1, "all_reduce_s": 0.125}, "efficiency = 0.9 of 100 Mbit/s"),
        # The exchange as said, and not hidden: no link is to blame.
        ({"exposed_communication_s": 0.1}, "the link is as said"),
        ({"other_s": 0.2}, "step_overhead = 10 ms; 0 s gives"),
        ({"ranks": 4}, "was for 4 ranks and 2 ran"),
    ],
)
def test_the_constant_that_was_off_is_named(comparison, changes, words):
    planned(comparison, **changes)
    assert words in found_in(comparison)[1]


def test_a_busy_machine_and_memory_are_named(comparison):
    result(planned(comparison), memory_bytes=600_000_000, waited_for_cpu=0.4)
    words = found_in(comparison)[1]
    assert "without a processor for 40% of the time" in words
    assert "reserved = 200 MB; 500 MB gives" in words


def test_settings_that_were_changed_are_said(comparison):
    run = planned(comparison)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"planned_settings_kept": False}))
    assert "changed after the plan" in found_in(comparison)[1]


def test_every_form_shows_both_columns(comparison):
    planned(comparison)
    report = build_report([comparison])
    for page in (report_page(report), report_text(report)):
        (section,) = [one for one in page.sections if one.heading == "Predicted and measured"]
        assert section.parts[0].rows[0][:3] == ("step", "750 ms", "750 ms")
    assert json.loads(report.to_json())["predicted"][0]["parts"]["step"]["predicted"] == 0.75


@pytest.mark.parametrize("fragments", [1, 4])
def test_an_exchange_in_fragments_is_that_of_all_of_them(comparison, fragments):
    run = planned(comparison, name="co2")
    values = json.loads((run / "result.json").read_text())
    values["sync"] = {"rounds": 8 * fragments, "fragments": fragments}
    (run / "result.json").write_text(json.dumps(values))
    found = found_in(comparison)[0]["one exchange in flight"]
    (summary,) = (s for s in build_report([comparison]).summaries if s.method == "co2")
    assert found.measured == pytest.approx(summary.in_flight_s / 8)


def test_loss_at_equal_time(comparison):
    """CO2 ends after 19 s; DDP's first validation is after 12.5 s, its second after 25 s."""
    runs = {run.method: run for run in build_report([comparison]).summaries}
    assert runs["co2"].bits_per_byte_at_equal_time == pytest.approx(1.9)
    assert runs["ddp"].bits_per_byte_at_equal_time == pytest.approx(
        3.5 - 0.5 * 6.5 / 12.5, abs=0.02
    )
    assert runs["none"].bits_per_byte_at_equal_time is None
    assert value_at_time([(1.0, 2.0)], 3.0) is None
