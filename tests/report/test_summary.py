"""Figures against values worked out by hand (the table in conftest.py) and the headline."""

from __future__ import annotations

import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.report import (
    build_report,
    print_page,
    read_runs,
    report_page,
    report_text,
    write_html,
)
from fivefold.report._reader import configuration_differences
from fivefold.report.page import TextBlock
from fivefold.report.summary import time_to_value


def _by_method(path):
    return {run.method: run for run in build_report([path]).summaries}


def test_rates_leave_out_validation(comparison):
    runs = _by_method(comparison)
    assert runs["none"].tokens_per_s == pytest.approx(131_072 / 16)
    assert runs["ddp"].tokens_per_s == pytest.approx(131_072 / 48)
    assert runs["co2"].tokens_per_s == pytest.approx(131_072 / 17)


def test_ratios_to_the_baselines(comparison):
    runs = _by_method(comparison)
    assert runs["ddp"].fraction_of_compute_only == pytest.approx(1 / 3)
    assert runs["co2"].fraction_of_compute_only == pytest.approx(16 / 17)
    assert runs["co2"].speed_ratio_to_ddp == pytest.approx(48 / 17)
    assert runs["ddp"].speed_ratio_to_ddp == 1


def test_seconds_overlap_and_exposed_share(comparison):
    run = _by_method(comparison)["co2"]
    assert run.wall_s == 19
    assert sum(run.seconds.values()) == pytest.approx(19)
    assert run.seconds["exposed_communication"] == pytest.approx(0.5)
    assert run.in_flight_s == pytest.approx(8 * 0.5)
    assert run.overlap_fraction == pytest.approx(1 - 0.5 / 4)
    assert run.exposed_fraction == pytest.approx(0.5 / 19)


def test_overlap_is_of_all_timelines_and_rank_0s_sums_only_without(comparison):
    folder = comparison / "co2"
    result = json.loads((folder / "result.json").read_text())
    result["communication"]["overlap_fraction"] = 0.25
    (folder / "result.json").write_text(json.dumps(result))
    assert _by_method(comparison)["co2"].overlap_fraction == pytest.approx(1 - 0.5 / 4)
    for path in (folder / "ranks").iterdir():
        path.unlink()
    assert _by_method(comparison)["co2"].overlap_fraction == 0.25


def test_bytes_per_step(comparison):
    runs = _by_method(comparison)
    assert runs["ddp"].payload_bytes_per_step == 12_000_000
    assert runs["ddp"].least_link_bytes_per_step == 12_000_000  # 2 (2 - 1) / 2 of it
    assert runs["co2"].payload_bytes_per_step == 1_500_000  # one round in eight steps
    assert runs["co2"].sent_bytes_per_step == pytest.approx(1_575_000)
    assert runs["co2"].received_bytes_per_step == pytest.approx(525_000)


@pytest.mark.parametrize("finished", [True, False], ids=["result", "timeline"])
def test_waits_by_cause(tmp_path, make_run, finished):
    folder = make_run(tmp_path / "co2", "co2", finished=finished)
    if finished:
        result = json.loads((folder / "result.json").read_text())
        waits = {"agreement on stopping": 0.125, "all-reduce": 0.375}
        (folder / "result.json").write_text(json.dumps(result | {"waits": waits}))
        expected = [("all-reduce", 0.375), ("agreement on stopping", 0.125)]
    else:
        expected = [("all-reduce", 0.5)]
    report = build_report([folder])
    assert list(report.summaries[0].waits.items()) == expected
    text = io.StringIO()
    print_page(report_text(report), file=text)
    (line,) = [line for line in text.getvalue().splitlines() if "all-reduce" in line]
    assert ("all-reduce 375 ms, agreement on stopping 125 ms" in line) is finished
    assert "all-reduce 500 ms" in line or finished
    page = write_html(report_page(report), tmp_path / "report.html").read_text()
    assert "agreement on stopping 125 ms" in page or not finished


def test_least_link_bytes_of_four_hosts_and_of_shared_links(tmp_path, make_run):
    make_run(tmp_path / "four" / "ddp", "ddp", world_size=4, hosts=4)
    make_run(tmp_path / "shared" / "ddp", "ddp", world_size=4, hosts=2)
    four = _by_method(tmp_path / "four")["ddp"]
    assert four.least_link_bytes_per_step == 18_000_000  # 2 * 3 / 4 * 12 MB
    assert _by_method(tmp_path / "shared")["ddp"].least_link_bytes_per_step is None


def test_time_to_ddps_final_loss_is_interpolated(comparison):
    runs = _by_method(comparison)
    # CO2: 2.4 at 12 + 6/16 + 1.5 s and 1.9 at 19 s; DDP ended at 2.0, four fifths of the way.
    assert runs["co2"].time_to_ddp_s == pytest.approx(13.875 + 0.8 * 5.125)
    assert runs["co2"].time_to_ddp_ratio == pytest.approx(50 / 17.975)
    assert runs["ddp"].time_to_ddp_s == pytest.approx(50)
    assert runs["none"].time_to_ddp_s is None  # its ranks trained apart


def test_a_loss_of_ddp_that_is_no_number_is_no_goal(comparison):
    file = comparison / "ddp" / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bits_per_byte": math.nan}))
    report = build_report([comparison])
    assert "did not reach" not in report.headline
    assert "It ended at 1.900 bits per byte, DDP at nan." in report.headline
    table = report_page(report).sections[0].parts[0]
    assert not any("not reached" in row for row in table.rows)


def test_a_loss_that_was_not_reached_is_said_and_null_for_programs(comparison):
    file = comparison / "ddp" / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bits_per_byte": 1.5}))
    report = build_report([comparison])
    assert "It did not reach DDP's final loss" in report.headline
    rows = {row[0]: row for row in report_page(report).sections[0].parts[0].rows}
    assert "not reached" in rows["CO2 (tau 8)"]
    co2 = next(run for run in json.loads(report.to_json())["runs"] if run["method"] == "co2")
    assert (co2["time_to_ddp_s"], co2["time_to_ddp_ratio"]) == (None, None)


def test_an_unfinished_run_is_summed_from_its_spans(tmp_path, make_run):
    make_run(tmp_path / "co2", "co2", finished=False)
    run = _by_method(tmp_path)["co2"]
    assert run.status == "unfinished"
    assert (run.steps, run.tokens, run.wall_s) == (64, 131_072, 19)
    assert run.seconds["compute"] == pytest.approx(16, abs=1e-3)
    assert run.overlap_fraction == pytest.approx(0.875, abs=1e-3)
    assert run.tokens_per_s == pytest.approx(131_072 / 17, rel=1e-3)


def test_the_reference_is_the_run_that_shares_most(tmp_path, make_run):
    for seed in (0, 1):
        make_run(tmp_path / f"ddp{seed}", "ddp", seed=seed)
    make_run(tmp_path / "co2", "co2", seed=1)
    slow = tmp_path / "ddp0" / "result.json"
    slow.write_text(json.dumps(json.loads(slow.read_text()) | {"tokens": 1}))
    run = _by_method(tmp_path)["co2"]
    assert run.speed_ratio_to_ddp == pytest.approx(48 / 17)


def test_headline_states_the_finding(comparison):
    report = build_report([comparison])
    assert report.headline == (
        "CO2 (tau 8) trained 2.82x as fast as DDP, 7,710 against 2,731 tokens/s (94 % of the "
        "speed without any communication), and hid 88 % of its communication behind computation. "
        "It reached DDP's final loss after 18 s, 2.78 times sooner than DDP itself; it ended at "
        "1.900 bits per byte, DDP at 2.000."
    )
    assert report.caveats == ()


def _change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_headline_admits_a_worse_loss(comparison):
    _change(comparison / "ddp" / "result.json", bits_per_byte=1.5)
    headline = build_report([comparison]).headline
    assert headline.endswith(
        "It did not reach DDP's final loss: it ended at 1.900 bits per byte, DDP at 1.500."
    )


def test_headline_admits_a_slower_run(comparison):
    _change(comparison / "co2" / "result.json", wall_s=98.0)  # 96 s of training against 48
    assert "CO2 (tau 8) was slower than DDP, at 0.50x its speed" in (
        build_report([comparison]).headline
    )


def test_headline_of_a_run_alone(comparison):
    assert build_report([comparison / "co2"]).headline == (
        "CO2 (tau 8) trained at 7,710 tokens/s, and hid 88 % of its communication behind "
        "computation. It ended at 1.900 bits per byte. There is no DDP run here to compare with."
    )


def test_caveats_say_what_limits_the_comparison(tmp_path, make_run):
    lab = {"hosts": 2, "shaped": False, "reason": "user namespaces are not allowed"}
    make_run(tmp_path / "ddp", "ddp", lab=lab)
    make_run(tmp_path / "co2", "co2", lab=lab, finished=False, torch="2.14.0")
    text = " ".join(build_report([tmp_path]).caveats)
    assert "Unshaped: user namespaces are not allowed." in text
    assert "Not finished: CO2 (tau 8)." in text
    assert "The runs differ in torch" in text


@pytest.mark.parametrize(
    ("co2", "none", "ratio"),
    [
        ({}, {"wall_s": 36.0}, "200.0 %"),  # 34 s of training against 17
        ({"waited_for_cpu": 0.02}, {"waited_for_cpu": 0.4}, "94 %"),
        ({"waited_for_cpu": 0.4}, {"waited_for_cpu": 0.02}, "94 %"),
    ],
)
def test_a_ratio_with_a_disturbed_run_is_said_to_be_disturbed(comparison, co2, none, ratio):
    for name, changes in (("co2", co2), ("none", none)):
        waited = {"process": {"waited_for_cpu": changes.pop("waited_for_cpu", None)}}
        _change(comparison / name / "result.json", **changes, **waited)
    report = build_report([comparison])
    assert report.summaries[2].fraction_of_compute_only is None
    assert "% of the speed without" not in report.headline
    assert "the speed without communication was disturbed" in report.headline
    (said,) = [text for text in report.caveats if "CO2 (tau 8) came to" in text]
    assert f"{ratio} of the speed without communication" in said
    assert "repeat them on an idle one" in said


def test_runs_that_were_equally_busy_are_compared(comparison):
    for name in ("none", "co2", "ddp"):
        _change(comparison / name / "result.json", process={"waited_for_cpu": 0.4})
    assert build_report([comparison]).caveats == ()


def test_what_a_run_did_not_read_is_a_caveat(tmp_path, make_run):
    data = {"read_bytes": 900, "disk_bytes": 1000, "said": "text: left out a.gz"}
    make_run(tmp_path / "ddp", "ddp", data=data)
    make_run(tmp_path / "co2", "co2", data=data | {"read_bytes": 999})
    report = build_report([tmp_path])
    (said,) = report.caveats
    assert said == "DDP did not read 10.0 % of its data: text: left out a.gz."
    told = [part.text for section in report_text(report).sections for part in section.parts
            if isinstance(part, TextBlock)]  # fmt: skip
    assert "data: text: left out a.gz" in told


def test_diverged_curves_are_no_error(comparison):
    path = comparison / "co2" / "metrics.jsonl"
    path.write_text(path.read_text().replace("2.4}", "NaN}"))
    _change(comparison / "co2" / "result.json", bits_per_byte=math.nan)
    report = build_report([comparison])
    assert json.loads(report.to_json())["runs"][2]["bits_per_byte"] is None


def test_only_differing_keys_are_listed(comparison):
    assert configuration_differences(read_runs([comparison])) == [
        ("run.output", ["runs/none", "runs/ddp", "runs/co2"]),
        ("sync.method", ["none", "ddp", "co2"]),
        ("sync.tau", ["", "", "8"]),
    ]


def test_json_holds_the_same_figures(comparison):
    values = json.loads(build_report([comparison]).to_json())
    assert [run["method"] for run in values["runs"]] == ["none", "ddp", "co2"]
    assert values["runs"][2]["speed_ratio_to_ddp"] == pytest.approx(48 / 17)


@pytest.mark.parametrize(
    ("points", "target", "expected"),
    [
        ([], 1.0, None),
        ([(5.0, 0.5)], 1.0, 5.0),
        ([(0.0, 3.0), (4.0, 1.0)], 2.5, 1.0),
        ([(0.0, 3.0), (4.0, 2.0), (8.0, 2.5), (12.0, 1.0)], 1.75, 10.0),
        ([(0.0, 3.0), (4.0, 2.0)], 1.999, None),
        ([(0.0, 3.0), (4.0, 2.0)], 2.0, 4.0),
    ],
)
def test_time_to_value_by_hand(points, target, expected):
    assert time_to_value(points, target) == expected


@given(
    values=st.lists(st.floats(0.5, 10), min_size=2, max_size=20),
    gaps=st.lists(st.floats(0.1, 100), min_size=20, max_size=20),
    target=st.floats(0.4, 11),
)
def test_time_to_value_is_the_first_time_the_line_is_there(values, gaps, target):
    times = [sum(gaps[:index]) for index in range(len(values))]
    points = list(zip(times, values, strict=True))
    found = time_to_value(points, target)
    if found is None:
        assert min(values) > target
        return
    before = [value for time_s, value in points if time_s < found - 1e-9]
    assert all(value > target for value in before)
    after = next(index for index, time_s in enumerate(times) if time_s >= found - 1e-9)
    if after > 0:  # the line through the two points takes the target's value there
        share = (found - times[after - 1]) / (times[after] - times[after - 1])
        height = values[after - 1] + share * (values[after] - values[after - 1])
        assert height == pytest.approx(target, abs=1e-6)


def test_waiting_counts_every_message_also_those_outside_the_method(comparison):
    path = comparison / "co2" / "result.json"
    seconds = json.loads(path.read_text())["seconds"] | {"exposed_communication": 1.9}
    _change(path, seconds=seconds)
    run = _by_method(comparison)["co2"]
    assert run.exposed_fraction == pytest.approx(0.1)  # 1.9 of 19 s
    assert run.exposed_wait_s == pytest.approx(0.5)


def test_headline_of_a_run_that_goes_on_claims_no_end(tmp_path, make_run):
    make_run(tmp_path / "ddp", "ddp")
    make_run(tmp_path / "co2", "co2", finished=False)
    report = build_report([tmp_path])
    assert report.headline.endswith("So far it is at 1.900 bits per byte, DDP at 2.000.")
    alone = build_report([tmp_path / "co2"]).headline
    assert "So far it is at 1.900 bits per byte." in alone


def _make_reordered(path, make_run):
    """DDP with a table [tasks]: twice as fast as the plain one, so that a mix-up shows."""
    make_run(path, "ddp", label="DDP (overlaps forward, priority)")
    config = path / "config.toml"
    config.write_text(config.read_text() + '\n[tasks]\nordering = "priority"\n')


def test_ddp_in_an_order_of_its_own_is_no_baseline(comparison, make_run):
    _make_reordered(comparison / "aaa", make_run)  # first by name
    report = build_report([comparison])
    assert [run.name for run in report.summaries] == ["none", "ddp", "aaa", "co2"]
    assert [run.is_plain_ddp for run in report.summaries] == [False, True, False, False]
    assert {run.ddp for run in report.summaries} == {"ddp"}
    assert report.headline.startswith("CO2 (tau 8) trained 2.82x as fast as DDP")


def test_ddp_in_an_order_of_its_own_is_what_is_looked_at(tmp_path, make_run):
    make_run(tmp_path / "z", "ddp")
    _make_reordered(tmp_path / "a", make_run)
    assert build_report([tmp_path]).headline.startswith(
        "DDP (overlaps forward, priority) was as fast as DDP"
    )


def test_ddp_in_an_order_of_its_own_alone_has_nothing_to_be_compared_with(tmp_path, make_run):
    _make_reordered(tmp_path / "a", make_run)
    report = build_report([tmp_path])
    assert report.summaries[0].ddp is None
    assert report.headline.endswith("There is no DDP run here to compare with.")
