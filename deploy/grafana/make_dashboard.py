"""The dashboard, as code: python deploy/grafana/make_dashboard.py > deploy/grafana/dashboards/shardline.json

`make docs` writes it, `make docs-check` says whether it is fresh. What a panel shows is the list PANELS.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import (
    common as build_common,
    dashboard as build,
    heatmap as build_heatmap,
    prometheus as build_prometheus,
    stat as build_stat,
    timeseries as build_timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard, heatmap, prometheus

SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
CLUSTER = 'job=~"$job",namespace=~"$namespace",run=~"$run"'
"""What chooses a cluster. namespace: of Kubernetes; run: where targets come from OUT/prometheus-targets.json.

A label that isn't there matches "All"."""


def one(metric: str, more: str = "", *, tasks: str = "$task") -> str:
    """Selector of a metric of the chosen tasks."""
    chosen = f'task=~"{tasks}"' if tasks else ""
    return f"{metric}{{{','.join(part for part in (CLUSTER, chosen, more) if part)}}}"


def rate(metric: str, more: str = "", *, tasks: str = "$task") -> str:
    """Increase per second of a counter."""
    return f"rate({one(metric, more, tasks=tasks)}[$__rate_interval])"


def both_ways(unit: str, by: str) -> str:
    """Bytes per second pushed and pulled, with the label `way`."""
    ways = (
        f'label_replace(sum by ({by}) ({rate(f"shardline_{way}_{unit}_bytes_total")}), "way", "{way}", "", "")'
        for way in ("push", "pull")
    )
    return " or ".join(ways)


def mean(histogram: str, by: str = "", more: str = "") -> str:
    """Mean of what a histogram has observed of late."""
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} ({rate(f'{histogram}_sum', more)}) / {grouped} ({rate(f'{histogram}_count', more)})"


CHIEF = "chief/.*"
PS = 'task=~"ps/.*"'
ALIVE = 'state="alive"'
WORKER = 'task!~"ps/.*"'


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture. queries: (legend, PromQL)."""

    title: str
    queries: Iterable[tuple[str, str]]
    unit: str = "short"
    kind: str = "lines"
    """lines, stack, number or heat."""
    text: str = ""
    width: int = 8
    bounds: tuple[tuple[float, str], ...] = field(default=())
    """Numbers: colour from this value on."""


@dataclass(frozen=True)
class Row:
    """A heading."""

    title: str


PANELS: tuple[Row | Panel, ...] = (
    Row("Job"),
    Panel(title="Step", kind="number", width=4, queries=[("", f"max({one('shardline_step', tasks=CHIEF)})")]),
    Panel(
        title="Steps/s",
        kind="number",
        width=4,
        queries=[("", f"sum(deriv({one('shardline_step', tasks=CHIEF)}[$__rate_interval]))")],
    ),
    Panel(title="Loss", kind="number", width=4, queries=[("", f"avg({one('shardline_loss', tasks=CHIEF)})")]),
    Panel(
        title="Tasks alive",
        kind="number",
        width=4,
        queries=[("", f"sum({one('shardline_tasks', ALIVE, tasks='')})")],
    ),
    Panel(
        title="Age of the checkpoint",
        kind="number",
        unit="s",
        width=4,
        queries=[("", f"max(time() - {one('shardline_checkpoint_timestamp_seconds', tasks='')})")],
        bounds=((1800, "yellow"), (3600, "red")),
    ),
    Panel(
        title="Alerts",
        kind="number",
        width=4,
        queries=[("", f'count(ALERTS{{{CLUSTER},alertstate="firing"}}) or vector(0)')],
        bounds=((1, "red"),),
    ),
    Panel(
        title="Steps per second",
        text="What the chief has counted; a rollback goes below 0.",
        queries=[("{{run}}", f"deriv({one('shardline_step', tasks=CHIEF)}[$__rate_interval])")],
    ),
    Panel(
        title="Tasks by state",
        kind="stack",
        queries=[("{{role}} {{state}}", f"sum by (role, state) ({one('shardline_tasks', tasks='')}) > 0")],
    ),
    Panel(
        title="Alerts by name",
        kind="stack",
        text="Pending and firing.",
        queries=[
            (
                "{{alertname}} {{alertstate}}",
                f"sum by (alertname, alertstate) (ALERTS{{{CLUSTER}}}) or "
                'label_replace(vector(0), "alertname", "none", "", "")',
            )
        ],
    ),
    Row("Training"),
    Panel(
        title="Loss",
        queries=[
            ("{{run}} mean of a step", one("shardline_loss", tasks=CHIEF)),
            ("{{task}}", one("shardline_loss", WORKER)),
        ],
    ),
    Panel(
        title="Evaluation",
        queries=[("{{run}} {{metric}}", f"max by (run, metric) ({one('shardline_evaluation_metric', tasks='')})")],
    ),
    Panel(
        title="Samples per second",
        queries=[("{{task}}", rate("shardline_examples_total", WORKER))],
    ),
    Row("A step"),
    Panel(
        title="Where a step's time goes",
        kind="stack",
        unit="s",
        width=12,
        text="Means over the chosen workers; an exchange is with one shard, several run side by side. Push "
        "counts from the end of the backward pass, barrier wait from the last push to the first byte pulled. The stack "
        "rises above the whole step where the next forward pass overlaps with the pull.",
        queries=[
            ("data", mean("shardline_data_seconds")),
            ("compute", mean("shardline_compute_seconds")),
            ("push", mean("shardline_push_seconds", more=WORKER)),
            ("barrier wait", mean("shardline_barrier_wait_seconds", more=WORKER)),
            ("pull", mean("shardline_pull_seconds", more=WORKER)),
            ("whole step", mean("shardline_step_seconds", more='task=~"worker/.*"')),
        ],
    ),
    Panel(
        title="Time of a step, by task",
        unit="s",
        width=12,
        queries=[
            ("{{task}}", mean("shardline_step_seconds", "run, task")),
            (
                "{{task}} 95 %",
                f"histogram_quantile(0.95, sum by (run, task, le) ({rate('shardline_step_seconds_bucket')}))",
            ),
        ],
    ),
    Panel(
        title="Barrier wait, by task",
        unit="s",
        text="Servers: from a step's first contribution to its last. Workers: waiting for the others.",
        queries=[("{{task}}", mean("shardline_barrier_wait_seconds", "run, task"))],
    ),
    Panel(
        title="Update rule on one bucket",
        unit="s",
        queries=[("{{task}} shard {{shard}}", mean("shardline_apply_seconds", "run, task, shard"))],
    ),
    Panel(
        title="Pushes, by what became of them",
        unit="ops",
        queries=[("{{outcome}}", f"sum by (outcome) ({rate('shardline_pushes_total', PS)})")],
    ),
    Row("Pipeline"),
    Panel(
        title="Bubble, by stage",
        unit="percentunit",
        text="Share of a step, from its first pass in any stage to its last, in which a stage computed nothing: with a "
        "flush at least (n - 1) / (m + n - 1) of n stages and m microbatches.",
        queries=[("{{run}} stage {{stage}}", one("shardline_pipeline_bubble_ratio", tasks=CHIEF))],
    ),
    Panel(
        title="A pass, by stage",
        unit="s",
        text="Of one microbatch. The longest stage limits all others.",
        queries=[("{{run}} stage {{stage}} {{way}}", one("shardline_stage_pass_seconds", tasks=CHIEF))],
    ),
    Panel(
        title="Microbatches held, by stage",
        text="Whose activations are in memory, of one replica.",
        queries=[("{{run}} stage {{stage}}", one("shardline_stage_held_microbatches", tasks=CHIEF))],
    ),
    Panel(
        title="Activations and their gradients sent",
        unit="Bps",
        queries=[("{{task}} to {{peer}}", rate("shardline_parcel_wire_bytes_total"))],
    ),
    Panel(
        title="Waiting for activations and gradients",
        unit="percentunit",
        text="Share of a worker's time in which its stages had nothing to compute with.",
        queries=[("{{task}}", rate("shardline_parcel_wait_seconds_total"))],
    ),
    Panel(
        title="Updates that parameters had missed",
        text="At most, in the last step of a stage: 0 with a flush.",
        queries=[("{{task}} stage {{stage}}", one("shardline_stage_staleness_steps"))],
    ),
    Row("Traffic"),
    Panel(
        title="On the wire, by task",
        unit="Bps",
        text="Pushes carry gradients to the servers, pulls parameters from them. Both ends count, so a cluster's sum "
        "is that of its servers. What lies in shared memory is on no wire.",
        queries=[("{{task}} {{way}}", both_ways("wire", "run, task"))],
    ),
    Panel(
        title="On the wire, by task and peer",
        unit="Bps",
        queries=[("{{task}} {{way}} {{peer}}", both_ways("wire", "run, task, peer"))],
    ),
    Panel(
        title="On the wire, by lane and codec",
        unit="Bps",
        queries=[("{{lane}} {{codec}} {{way}}", both_ways("wire", "lane, codec"))],
    ),
    Panel(
        title="As held in memory, by lane and codec",
        unit="Bps",
        text="The same before the codec; with it what went through shared memory.",
        queries=[("{{lane}} {{codec}} {{way}}", both_ways("raw", "lane, codec"))],
    ),
    Panel(
        title="Compression ratio",
        text="Bytes in memory per byte sent, without shared memory.",
        queries=[("{{task}} {{codec}} {{way}}", one("shardline:compression:ratio"))],
    ),
    Panel(
        title="Error of codecs",
        unit="percentunit",
        text="Norm of what encoding changed, over that of the values; error memory makes up for it later.",
        queries=[("{{task}} {{codec}} {{way}}", one("shardline_codec_error_ratio"))],
    ),
    Panel(
        title="Error memory",
        text="Norm of what the codec of gradients has yet to send.",
        queries=[("{{task}} {{codec}}", one("shardline_codec_memory_norm"))],
    ),
    Panel(
        title="Use of the line",
        unit="percentunit",
        text="All tasks of a host together, each way; where its rate is known (see SHARDLINE_LINK_MBIT).",
        queries=[("{{host}} {{direction}}", one("shardline:link_use:ratio", tasks=""))],
    ),
    Panel(
        title="Calls retried",
        unit="ops",
        queries=[("{{task}} to {{peer}}", rate("shardline_rpc_retries_total"))],
    ),
    Panel(
        title="Lanes in use",
        queries=[("{{task}} {{lane}}", one("shardline_lane_attachments"))],
    ),
    Panel(
        title="Lanes given up",
        queries=[("{{task}} {{lane}}", one("shardline_lane_fallbacks_total"))],
    ),
    Row("Staleness and shards"),
    Panel(
        title="Staleness of applied pushes",
        kind="heat",
        unit="short",
        width=12,
        text="Updates between the version a gradient was computed from and the one it was applied to.",
        queries=[
            (
                "{{le}}",
                "sum by (le) (increase(" + one("shardline_staleness_updates_bucket", PS) + "[$__rate_interval]))",
            )
        ],
    ),
    Panel(
        title="Staleness",
        width=12,
        queries=[
            ("{{run}} mean", mean("shardline_staleness_updates", "run", PS)),
            ("{{run}} 95 %", one("shardline:staleness:p95", tasks="")),
            ("{{run}} bound", one("shardline:staleness:bound", tasks="")),
        ],
    ),
    Panel(
        title="Version of a shard",
        unit="locale",
        queries=[("{{task}} shard {{shard}}", one("shardline_shard_version"))],
    ),
    Panel(
        title="Updates per second, by shard",
        unit="ops",
        queries=[("{{task}} shard {{shard}}", f"deriv({one('shardline_shard_version')}[$__rate_interval])")],
    ),
    Panel(
        title="Memory held by servers",
        kind="stack",
        unit="bytes",
        queries=[("{{task}} {{kind}}", one("shardline_held_bytes"))],
    ),
    Panel(
        title="Staging, used of its limit",
        unit="percentunit",
        queries=[("{{task}}", f"{one('shardline_staging_bytes')} / {one('shardline_staging_limit_bytes')}")],
    ),
    Panel(
        title="Waiting for room in staging",
        unit="percentunit",
        text="Seconds of waiting per second, over all contributions.",
        queries=[("{{task}}", rate("shardline_staging_wait_seconds_sum"))],
    ),
    Panel(
        title="NaN and infinity",
        queries=[
            ("{{task}} {{what}}", one("shardline_nonfinite_total")),
            ("{{task}} steps without an update", one("shardline_skipped_steps_total", PS)),
        ],
    ),
    Row("Checkpoints"),
    Panel(
        title="Age",
        unit="s",
        queries=[("{{run}}", f"time() - {one('shardline_checkpoint_timestamp_seconds', tasks='')}")],
    ),
    Panel(title="Size", unit="bytes", queries=[("{{run}}", one("shardline_checkpoint_bytes", tasks=""))]),
    Panel(
        title="Step of the last one, and where the job is",
        queries=[
            ("{{run}} checkpoint", one("shardline_checkpoint_step", tasks="")),
            ("{{run}} job", one("shardline_step", tasks=CHIEF)),
        ],
    ),
    Panel(title="Writing one", unit="s", queries=[("", mean("shardline_checkpoint_seconds"))]),
    Panel(
        title="Written and failed",
        queries=[("{{run}} {{outcome}}", one("shardline_checkpoints_total", tasks=""))],
    ),
    Panel(title="Scoring one", unit="s", queries=[("", mean("shardline_evaluation_seconds"))]),
)


def query(legend: str, expr: str, number: int, kind: str) -> build_prometheus.Dataquery:
    """One PromQL query of a panel."""
    made = build_prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(chr(ord("A") + number)).range()
    return made.format(prometheus.PromQueryFormat.HEATMAP) if kind == "heat" else made


def picture(panel: Panel) -> build_stat.Panel | build_heatmap.Panel | build_timeseries.Panel:
    """A panel as Grafana's."""
    made: build_stat.Panel | build_heatmap.Panel | build_timeseries.Panel
    if panel.kind == "number":
        steps = [dashboard.Threshold(value=None, color="green")]
        steps += [dashboard.Threshold(value=value, color=color) for value, color in panel.bounds]
        limits = build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)
        last = build_common.ReduceDataOptions().calcs(["lastNotNull"])
        made = build_stat.Panel().thresholds(limits).reduce_options(last).height(4)
    elif panel.kind == "heat":
        colors = build_heatmap.HeatmapColorOptions().mode(heatmap.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
        made = build_heatmap.Panel().color(colors).height(8)
    else:
        legend = build_common.VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM)
        legend = legend.display_mode(common.LegendDisplayMode.LIST).calcs(["lastNotNull"])
        tooltip = build_common.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI)
        made = build_timeseries.Panel().legend(legend).tooltip(tooltip).height(8).line_width(1)
        if panel.kind == "stack":
            made = made.stacking(build_common.StackingConfig().mode(common.StackingMode.NORMAL)).fill_opacity(40)
            made = made.override_by_name("whole step", WHOLE)
    made = made.title(panel.title).datasource(SOURCE).unit(panel.unit).span(panel.width)
    if panel.text:
        made = made.description(panel.text)
    for number, (legend_text, expr) in enumerate(panel.queries):
        made = made.with_target(query(legend_text, expr, number, panel.kind))
    return made


WHOLE = [
    dashboard.DynamicConfigValue(id_val="custom.stacking", value={"mode": "none", "group": "whole"}),
    dashboard.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
    dashboard.DynamicConfigValue(id_val="custom.lineWidth", value=2),
]
"""A line over the stack."""


def variable(name: str, label: str, metric: str) -> build.QueryVariable:
    """A choice among the values of a label; all by default, which includes those without the label."""
    everything = dashboard.VariableOption(selected=True, text="All", value="$__all")
    return (
        build.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(f"label_values({metric}, {name})")
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.NUMERICAL_ASC)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .current(everything)
    )


def make() -> dashboard.Dashboard:
    """The whole dashboard."""
    made = (
        build.Dashboard("Shardline")
        .uid("shardline")
        .description("Training on parameter servers. Made by deploy/grafana/make_dashboard.py.")
        .tags(["shardline"])
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .time("now-15m", "now")
        .refresh("5s")
        .with_variable(
            build.DatasourceVariable("datasource")
            .label("Prometheus")
            .type("prometheus")
            .current(dashboard.VariableOption(text="Shardline", value="shardline-prometheus"))
        )
        .with_variable(variable("job", "Job", "shardline_step"))
        .with_variable(variable("namespace", "Namespace", 'shardline_step{job=~"$job"}'))
        .with_variable(variable("run", "Run", 'shardline_step{job=~"$job",namespace=~"$namespace"}'))
        .with_variable(variable("task", "Task", f"shardline_step{{{CLUSTER}}}"))
    )
    for number, item in enumerate(PANELS, start=1):
        if isinstance(item, Row):
            made = made.with_row(build.Row(item.title).id(number))
        else:
            made = made.with_panel(picture(item).id(number))
    return made.build()


if __name__ == "__main__":
    print(JSONEncoder(sort_keys=True, indent=2).encode(make()))
