"""What the sets of benchmarks make of samples: ratios, bars, what is left out. Samples are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import native_share, plots, report
from benchmarks.contenders import RAY, RPC_SHM, RPC_TCP, TENSORFLOW, Contender, Rival, Variant, collect, interleaved
from benchmarks.figures import AT_MOST, Row, StepTimes, median, speed_row
from benchmarks.machine import cpu_model, memory_gib
from benchmarks.process import ContenderError
from benchmarks.push_pull import Work, merge
from benchmarks.run import sentence, write
from benchmarks.sets import (
    ALL,
    bubbles,
    data_plane,
    fan_in,
    fixed_price,
    links,
    overhead,
    overlap,
    pipelines,
    scaling,
    sizes,
    small_tensors,
    start,
    tensors,
    workers,
)
from benchmarks.train_job import summary


def steps(*seconds: float) -> list[dict[str, Any]]:
    processor = {"megabytes": 50.0, "cpu_s_per_step": {"workers": 0.03, "ps": 0.05}}
    return [{"median_s": value, **processor} for value in seconds]


def of(rows: list[Row], work: str) -> Row:
    return next(row for row in rows if row.work == work)


def test_ratio_is_that_of_medians_against_the_fastest_rival() -> None:
    samples = {"ours": steps(0.1, 0.2, 9.0), "slow": steps(1.0), "fast": steps(0.4, 0.4, 0.001)}
    row = speed_row(samples, "work", "ours", ["slow", "fast"], 2.0)
    assert row.value == pytest.approx(5.0)
    assert row.against == {"slow": pytest.approx(1.0), "fast": pytest.approx(2.5)}
    assert row.ratio == pytest.approx(2.0)
    assert row.met is True


def test_bar_that_is_just_missed_is_missed() -> None:
    row = speed_row({"ours": steps(0.1001), "rival": steps(0.1)}, "work", "ours", ["rival"], 1.0)
    assert row.met is False
    assert "NOT MET" in sentence(row)


def test_rival_that_could_not_run_is_named_and_does_not_count() -> None:
    row = speed_row({"ours": steps(0.1), "here": steps(0.2), "away": []}, "work", "ours", ["here", "away"], 3.0)
    assert row.ratio == pytest.approx(2.0)
    assert row.note == "not measured: away"


def test_without_any_rival_nothing_is_met_or_missed() -> None:
    row = speed_row({"ours": steps(0.1)}, "work", "ours", ["away"], 1.0)
    assert row.ratio is None
    assert row.met is None


def test_row_of_at_most_is_met_from_below() -> None:
    assert Row(work="w", value=1.0, unit="ms", ratio=1.25, bar=1.25, sense=AT_MOST).met is True
    assert Row(work="w", value=1.0, unit="ms", ratio=1.26, bar=1.25, sense=AT_MOST).met is False


def test_median_of_no_samples_is_none() -> None:
    assert median({"ours": []}, "ours") is None
    assert median({}, "ours") is None


def test_contenders_take_turns() -> None:
    ran: list[str] = []

    def contender(name: str) -> Contender:
        def run() -> dict[str, float]:
            ran.append(name)
            return {"median_s": 0.1}

        return Contender(name=name, run=run)

    samples, failures = collect([contender("a"), contender("b")], 3, say=lambda text: None)
    assert ran == ["a", "b"] * 3
    assert [len(found) for found in samples.values()] == [3, 3]
    assert failures == {}
    assert [repeat for repeat, _ in interleaved([contender("a")], 2)] == [0, 1]


def test_contender_that_fails_late_has_no_samples_and_is_not_tried_again() -> None:
    calls: list[int] = []

    def run() -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:
            raise ContenderError("no more")
        return {"median_s": 0.1}

    samples, failures = collect([Contender(name="a", run=run)], 5, say=lambda text: None)
    assert samples == {"a": []}
    assert failures == {"a": "no more"}
    assert len(calls) == 2


def test_data_plane_compares_every_lane_with_its_own_rivals() -> None:
    samples = {
        data_plane.GRPC: steps(0.1),
        data_plane.TCP: steps(0.05),
        data_plane.ZERO_COPY: steps(0.01),
        data_plane.FLOOR: steps(0.008),
        data_plane.ORDINARY: steps(0.02),
        data_plane.TLS: steps(0.2),
        TENSORFLOW: steps(0.1),
        RPC_TCP: steps(0.12),
        RPC_SHM: steps(0.05),
        RAY: steps(0.03),
        data_plane.one_call(RAY): steps(0.04),
    }
    rows = data_plane.rows(samples)
    assert of(rows, data_plane.GRPC).ratio == pytest.approx(1.0)
    assert of(rows, data_plane.GRPC).met is True
    assert of(rows, data_plane.TCP).ratio == pytest.approx(2.0)
    assert of(rows, data_plane.ZERO_COPY).ratio == pytest.approx(3.0)
    assert of(rows, data_plane.ORDINARY).ratio == pytest.approx(1.5)
    assert of(rows, data_plane.TLS).met is None
    whole = of(rows, f"{data_plane.ZERO_COPY}, rivals with one call a step")
    assert whole.ratio == pytest.approx(4.0)
    assert whole.bar is None
    floor = of(rows, f"{data_plane.ZERO_COPY}: beside the memory floor")
    assert floor.ratio == pytest.approx(1.25)
    assert floor.met is True
    assert of(rows, f"{data_plane.TCP}: processor time").value == pytest.approx(0.8)


def test_sizes_have_the_bars_of_each_size_and_of_memory() -> None:
    def sample(seconds: float, peak_mb: float) -> dict[str, object]:
        peak, idle = {"ps": peak_mb / sizes.MIB_MB}, {"ps": 300.0 / sizes.MIB_MB}
        memory = {"peak_mb": peak, "idle_mb": idle, "planned_ps_mb": 700.0, "mapped_mb": 100.0}
        return {**steps(seconds)[0], **memory}

    own = {megabytes: sizes.keyed(data_plane.GRPC, megabytes) for megabytes in (4.0, 400.0)}
    tcp = {megabytes: sizes.keyed(data_plane.TCP, megabytes) for megabytes in (4.0, 400.0)}
    samples = {
        own[4.0]: [sample(0.01, 1250.0)],
        own[400.0]: [sample(1.0, 1301.0)],
        sizes.keyed(TENSORFLOW, 4.0): steps(0.02),
        sizes.keyed(TENSORFLOW, 400.0): steps(0.9),
    }
    rows = sizes.rows(samples)
    assert of(rows, own[4.0]).met is True
    assert of(rows, own[400.0]).met is False
    assert [of(rows, tcp[megabytes]).bar for megabytes in (4.0, 400.0)] == [1.2, 1.15]
    memory = f"{own[4.0]}: memory of the ps beyond its plan"
    assert of(rows, memory).value == pytest.approx(150.0)
    assert of(rows, memory).met is True
    assert of(rows, f"{own[400.0]}: memory of the ps beyond its plan").met is False


def test_fixed_price_is_milliseconds() -> None:
    samples = {
        fixed_price.own("shm"): steps(0.00029),
        fixed_price.own("tcp"): steps(0.00061),
        fixed_price.bare("unix"): steps(0.00002),
    }
    rows = fixed_price.rows(samples)
    shm = of(rows, fixed_price.own("shm"))
    assert shm.met is True
    assert shm.note.endswith("0.020 ms")
    assert of(rows, fixed_price.own("tcp")).met is False
    assert of(rows, fixed_price.own("grpc")).met is None


def test_small_tensors_may_take_1_2_times_as_long() -> None:
    samples = {
        small_tensors.many("grpc"): steps(0.012),
        small_tensors.one("grpc"): steps(0.01),
        small_tensors.many("tcp"): steps(0.02),
        small_tensors.one("tcp"): steps(0.01),
    }
    rows = small_tensors.rows(samples)
    assert of(rows, small_tensors.many("grpc")).met is True
    assert of(rows, small_tensors.many("tcp")).met is False
    assert of(rows, small_tensors.many("shm")).met is None


def test_workers_are_compared_with_as_many_processes() -> None:
    samples = {
        workers.ours(2): steps(0.1),
        workers.ours(4): steps(0.1),
        "gloo all-reduce, 2 processes": steps(0.13),
        "gloo all-reduce, 4 processes": steps(0.12),
    }
    rows = workers.rows(samples)
    assert of(rows, workers.ours(2)).ratio == pytest.approx(1.3)
    assert of(rows, workers.ours(4)).met is False


def test_links_compare_each_direction_with_iperf3_in_the_same() -> None:
    rate = "1 Gbit/s"
    samples = {
        links.iperf_name(rate): [{"push": 120e6, "pull": 100e6, "both": 200e6}],
        links.lane_name("auto", rate): [{"push": 114e6, "pull": 94e6, "both": 150e6, "lane": "tcp"}],
        links.iperf_name(links.FASTEST): [{"push": 1e9, "pull": 1e9, "both": 2e9}],
        links.lane_name("auto", links.FASTEST): [{"push": 1e9, "pull": 1e9, "both": 1.9e9, "lane": "tcp"}],
    }
    rows = links.rows(samples)
    push, pull = (of(rows, f"{way}, {links.lane_name('auto', rate)}") for way in ("push", "pull"))
    assert push.value == pytest.approx(912.0)
    assert push.met is True
    assert pull.met is False
    assert push.note == "used: tcp"
    assert of(rows, f"push, {links.lane_name('auto', '100 Mbit/s')}").met is None
    assert of(rows, f"both, {links.lane_name('auto', rate)}").met is None
    assert of(rows, f"both, {links.lane_name('auto', links.FASTEST)}").met is True


def test_fan_in_is_compared_with_as_many_streams_and_has_a_bar_where_the_link_is_full() -> None:
    samples = {
        fan_in.ours(2): [{"bytes_per_s": 100e6}],
        fan_in.streams(2): [{"bytes_per_s": 200e6}],
        fan_in.ours(4): [{"bytes_per_s": 450e6}],
        fan_in.streams(4): [{"bytes_per_s": 500e6}],
        fan_in.ours(8): [{"bytes_per_s": 440e6}],
        fan_in.streams(8): [{"bytes_per_s": 500e6}],
    }
    assert [row.met for row in fan_in.rows(samples)] == [None, None, True, False]


def test_native_share_is_all_but_the_interpreter() -> None:
    report = """
 50.00% ,[kernel.kallsyms]
 10.00% ,[kernel.vmlinux]
 24.90% ,libpython3.11.so.1.0
 15.00% ,libshardline.so
  0.10% ,libz.so.1
"""
    found = native_share.summary(native_share.shares(report))
    assert found["native"] == pytest.approx(0.751)
    assert found["share"] == {"kernel": 0.6, "libpython3.11.so.1.0": 0.249, "libshardline.so": 0.15}
    with pytest.raises(ContenderError, match="recorded nothing"):
        native_share.summary(native_share.shares(""))


def test_scaling_is_the_second_server_s_gain() -> None:
    samples = {scaling.ONE: steps(0.18), scaling.TWO: steps(0.1)}
    (row,) = scaling.rows(samples)
    assert row.ratio == pytest.approx(1.8)
    assert row.met is True


def test_overlap_is_measured_against_the_longer_part() -> None:
    samples = {
        overlap.COMPUTE: steps(0.3),
        overlap.COMMUNICATION: steps(0.2),
        overlap.WITH: steps(0.36),
        overlap.WITHOUT: steps(0.5),
    }
    rows = overlap.rows(samples)
    assert rows[0].ratio == pytest.approx(1.2)
    assert rows[0].met is True
    assert rows[1].ratio == pytest.approx(5 / 3)
    assert rows[1].met is None


def test_batch_is_found_on_the_line_through_two_trials() -> None:
    assert overlap.batch_for(0.5, {100: 0.1, 200: 0.2}) == 500
    assert overlap.batch_for(0.0, {100: 0.1, 200: 0.2}) == 1


def test_trials_of_a_busy_machine_are_refused() -> None:
    with pytest.raises(ContenderError, match="too busy"):
        overlap.batch_for(0.5, {100: 0.2, 200: 0.1})


@pytest.mark.parametrize(("forward_s", "bar"), [(0.1, overhead.BAR), (0.01, None)])
def test_overhead_has_a_bar_only_where_a_step_computes_long_enough(forward_s: float, bar: float | None) -> None:
    alone = {"median_s": 0.25, "forward_s": forward_s, "backward_s": 0.12, "megabytes": 6.0}
    (row,) = overhead.rows({overhead.ALONE: [alone], overhead.CLUSTER: steps(0.26)})
    assert row.ratio == pytest.approx(1.04)
    assert row.bar == bar


@pytest.mark.parametrize("name", sorted(ALL))
def test_sets_that_could_not_run_still_say_what_was_asked(name: str) -> None:
    for row in ALL[name].rows({}):
        assert row.met is None
        assert sentence(row)


def worker_sample(seconds: list[float], **changes: object) -> dict[str, object]:
    sample = {
        "seconds": seconds,
        "cpu_s_per_step": 0.01,
        "bytes": 4_000_000,
        "lane": "tcp",
        "fallbacks": [],
        "idle_mb": 200.0,
        "peak_mb": 250.0,
    }
    return {**sample, **changes}


PS_SAMPLE = {"cpu_s": 0.5, "peak_mb": 400.0, "idle_mb": 300.0, "planned_mb": 75.0}


def test_step_takes_as_long_as_its_slowest_worker() -> None:
    found = merge(
        [worker_sample([0.1, 0.2, 0.3]), worker_sample([0.4, 0.1, 0.1])], [PS_SAMPLE], Work(workers=2, lane="tcp")
    )
    assert found["seconds"] == [0.4, 0.2, 0.3]
    assert found["median_s"] == 0.3
    assert found["gigabytes_per_s_both_ways"] == pytest.approx(4e6 * 2 * 2 / 0.3 / 1e9, abs=1e-3)


def test_gradients_of_workers_in_shared_memory_are_no_memory_of_the_server() -> None:
    over_tcp = merge([worker_sample([0.1])] * 2, [PS_SAMPLE], Work(workers=2, lane="tcp"))
    shared = merge([worker_sample([0.1], lane="shm")] * 2, [PS_SAMPLE], Work(workers=2, lane="shm"))
    assert (over_tcp["mapped_mb"], shared["mapped_mb"]) == (0.0, 8.0)
    assert over_tcp["planned_ps_mb"] == 75.0


def test_figures_of_another_lane_than_asked_for_are_refused() -> None:
    fallen = worker_sample([0.1], lane="grpc", fallbacks=["tcp: the port is blocked"])
    with pytest.raises(ContenderError, match=r"lane tcp was not used.*the port is blocked"):
        merge([fallen], [PS_SAMPLE], Work(lane="tcp"))
    assert merge([fallen], [PS_SAMPLE], Work(lane="auto"))["lane"] == "grpc"


def test_step_times_of_marks_leave_the_warm_up_out() -> None:
    assert summary([0.0, 5.0, 6.0, 8.0], 1)["seconds"] == [1.0, 2.0]
    assert StepTimes((0.1, 0.3, 0.2)).median_s == 0.2


def test_first_variant_of_a_rival_is_the_plainest() -> None:
    rival = Rival(name="r", script="r.py", venv="none", variants=(Variant(tensors=1), Variant(tensors=4, tuned=False)))
    assert rival.variants[1].label() == "4 pieces, allocator as it is"


def test_machine_is_read_from_proc() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: Fast 3000\n") == "Fast 3000"
    assert memory_gib("MemTotal:       2097152 kB\nMemFree: 1 kB\n") == 2.0


def test_bubbles_and_rates_come_from_the_passes_of_a_trace() -> None:
    def one(step: int, stage: int, start: float, end: float) -> dict[str, Any]:
        return {"ts": 1e6 * start, "dur": 1e6 * (end - start), "args": {"step": step, "stage": stage}}

    # Three stages one after the other, two seconds each; step 1 begins four seconds after step 0's end.
    found = [
        one(step, stage, 10 * step + 2 * stage, 10 * step + 2 * stage + 2) for step in (4, 5, 6) for stage in (0, 1, 2)
    ]
    figures = bubbles.figures(found)
    assert figures == {"median_s": 10.0, "longest_s": 2.0, "bubble": pytest.approx(2 / 3), "steps": 2}


def test_the_plans_that_are_compared_are_those_of_an_unbalanced_model() -> None:
    found = {name: [(stage.first, stage.workers) for stage in plan] for name, plan in bubbles.plans().items()}
    assert found == {
        bubbles.SEQUENTIAL: [(0, (0,)), (2, (1,))],
        # Both ends in one worker.
        bubbles.MIXED: [(0, (0,)), (1, (1,)), (2, (2,)), (3, (0,))],
    }


def test_results_are_written_as_json_and_png(tmp_path: Path) -> None:
    rows = [Row(work="a", value=2.0, unit="steps/s", ratio=2.0, bar=1.0, against={"b": 1.0})]
    write(tmp_path, "set", "about", rows, samples={"a": [{}]}, failures={"c": "why"}, around={"machine": {}})
    found = json.loads((tmp_path / "set.json").read_text())
    assert found["rows"][0]["met"] is True
    assert found["not_run"] == {"c": "why"}
    drawn = (tmp_path / "set.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    (tmp_path / "set.png").unlink()
    (tmp_path / "load.json").write_text('{"pushes": 1}')
    assert plots.redraw(tmp_path) == [tmp_path / "set.png"]
    assert (tmp_path / "set.png").read_bytes() == drawn


def test_page_of_results_says_which_bars_are_missed_and_what_is_not_known() -> None:
    row = Row(work="a", value=1.0, unit="steps/s", ratio=0.5, bar=1.8, against={"b": 2.0}, note="used: tcp")
    memory = [
        Row(work=f"{name}: c", value=mb, unit="MB", ratio=mb, bar=200.0, sense=AT_MOST)
        for name, mb in (("x", 8.0), ("y", 9.0), ("z", 7.0))
    ]
    machine = {"cores": 2, "cpu": "X", "versions": {"torch": "2"}, "commit": "abcdef123", "clean": False}
    found = {
        "set": "links",
        "about": "links",
        "rows": [
            row.to_json(),
            *(one.to_json() for one in memory),
            Row(work="d", value=None, unit="ms", bar=1.0).to_json(),
        ],
        "not_run": {"iperf3": "there is none"},
        "machine": {**machine, "load_before": [0.5]},
        "scale": {"repeats": 3},
        "network": {"links": "loopback", "namespace": True},
    }
    text = report.page({"links": found})
    assert "3 bars are met, 1 are missed: 1 of [links](#links).\n" in text
    assert "| a (used: tcp) | 1 steps/s | b 2 | 0.50 | ≥ 1.8: **missed** |" in text
    assert "| y: c | 9 MB | | | ≤ 200 |" in text and ": c | 8 MB" not in text
    assert "| d | not measured | | | ≥ 1 |" in text
    assert "(Commit abcdef1 with changes; load 0.5.)" in text and "they ran on 2 cores of an X," in text
    assert "- Not run: iperf3: there is none" in text
    assert "## overlap\n\n" in text and text.count("Not measured yet.") == len(ALL) - 1


def test_page_of_results_and_readme_have_the_figures_that_are_recorded() -> None:
    found = report.read(report.RESULTS)
    assert report.PAGE.read_text() == report.page(found), "run: make docs"
    readme = (report.RESULTS.parents[1] / "README.md").read_text()
    table = readme.partition("times as fast |\n")[2].partition("\n\n")[0].splitlines()[1:]
    recorded = {f"{row['ratio']:.2f}" for one in found.values() for row in one.get("rows", ()) if row["ratio"]}
    assert len(table) == 5
    for line in table:
        assert line.split("|")[-2].strip() in recorded, f"README: no row has the figure of {line}"


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert plots.draw(tmp_path / "x.png", "x", [Row(work="a", value=None, unit="ms")]) is False
    assert not (tmp_path / "x.png").exists()


def test_start_is_compared_with_the_import_of_torch_and_the_end_with_a_second() -> None:
    samples = {start.IMPORT: [{"seconds": 2.0}], start.TRAIN: [{"first_s": 5.1, "end_s": 0.9, "seconds": 8.0}]}
    first, end, whole = start.rows(samples)
    assert (first.ratio, first.met) == (pytest.approx(2.55), False)
    assert (end.ratio, end.met) == (0.9, True)
    assert (whole.value, whole.met) == (8.0, None)


def test_a_pipeline_is_beside_what_is_predicted_of_it_with_the_error() -> None:
    planned = {"median_s": 0.3, "bytes": 100e6, "memory": [20e6, 50e6], "measured_memory": [19e6, 56e6]}
    samples = {"flush": [{"median_s": 0.4, "bytes": 104e6}], "flush, predicted": [planned]}
    found = {row.work: row for row in pipelines.rows(samples) if row.work.startswith("flush: ")}
    speed, size = (found[f"flush: {what}"] for what in ("speed", "bytes"))
    assert (speed.value, speed.ratio, speed.met) == (2.5, pytest.approx(1 / 3), None)
    assert (size.value, size.against, size.met) == (104.0, {"predicted": 100.0}, True)
    assert size.ratio == pytest.approx(0.04, abs=0.002)
    memory = found["flush: memory"]
    assert (memory.value, memory.ratio, memory.met) == (56.0, pytest.approx(6 / 56), False)
    lacking = [row for row in pipelines.rows({}) if row.work.startswith("flush: ")]
    assert [(row.value, row.met) for row in lacking] == [(None, None)] * 2


def test_tensors_compares_what_grows_between_the_two_largest_sizes() -> None:
    def phases(first_s: float, export_s: float) -> dict[str, float]:
        return {**dict.fromkeys(tensors.PHASES, 1.0), "first_s": first_s, "export_s": export_s}

    spent = {1: phases(5.0, 2.0), 100: phases(5.1, 2.5), 1_000: phases(6.0, 3.0), 10_000: phases(15.0, 102.0)}
    samples = {tensors.named(size): [{"tensors": size, **found}] for size, found in spent.items()}
    first, step, *_, export = tensors.rows(samples)
    assert first.value == pytest.approx(1.0) and first.met is True
    # What did not grow counts as a twentieth of the constant at both sizes.
    assert step.value == 0.0 and step.met is True
    assert export.value == pytest.approx(2.0) and export.met is False
    assert export.note == "1 tensor 2 s; 100 tensors 2.5 s; 1,000 tensors 3 s; 10,000 tensors 102 s"
