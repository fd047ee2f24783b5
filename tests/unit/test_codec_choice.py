"""Codec auto: what the chief measures, chooses, tries and takes back."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest

from shardline.codecs.auto import CodecSpeed, StepCost, choose, estimate, options
from shardline.core.orders import Phase, StepReport
from shardline.errors import JobError
from shardline.fit import check_fit
from shardline_chief.rules.actions import Action, Command, Configure, MeasureCodecs
from shardline_chief.rules.codecs.choice import LEAST_S, LEAST_STEPS
from tests.support.builders import make_job_spec
from tests.support.chief_cluster import Cluster, T, make_job, other, phase
from tests.support.mortal_chief import Killed, Mortal, cut

SPEEDS = {
    "raw": CodecSpeed(share=1.0, encode_s=0.0, decode_s=0.0),
    "bf16": CodecSpeed(share=0.5, encode_s=0.2e-9, decode_s=0.2e-9),
    "int8": CodecSpeed(share=0.26, encode_s=0.5e-9, decode_s=0.5e-9),
    "onebit": CodecSpeed(share=0.033, encode_s=0.7e-9, decode_s=0.7e-9),
    "topk": CodecSpeed(share=0.015, encode_s=2.5e-9, decode_s=0.9e-9),
}
MB = 10**6
CHOSEN = ("raw", "topk", "delta:by=topk")
"""What a link of 4 s for a pass of 0.1 s makes the chief choose."""


def cost(*, compute_s: float, mbit: float, nbytes: int = 25 * MB, workers: int = 2) -> StepCost:
    """Two workers whose links have this rate, without overlap."""
    exchange_s = 2 * nbytes * 8 / (mbit * 1e6)
    return StepCost(
        step_s=compute_s + exchange_s,
        compute_s=compute_s,
        exchange_s=exchange_s,
        nbytes=nbytes,
        replicas=workers,
        workers=workers,
        servers=1,
    )


@pytest.mark.parametrize(
    ("compute_s", "mbit", "up"),
    [
        (5.0, 100.0, "raw"),
        (2.5, 100.0, "bf16"),
        (1.5, 100.0, "int8"),
        (0.9, 100.0, "onebit"),
        (0.1, 100.0, "topk"),
        (0.1, 100_000.0, "raw"),
    ],
)
def test_the_most_exact_codec_that_hides_the_exchange_is_chosen(compute_s: float, mbit: float, up: str) -> None:
    found = choose(options(0), cost(compute_s=compute_s, mbit=mbit), SPEEDS)
    assert found.option.up == up


def test_an_option_that_saves_too_little_does_not_hide_one_that_saves_enough() -> None:
    given = cost(compute_s=1.2, mbit=100.0)
    slow = {**SPEEDS, "bf16": CodecSpeed(share=0.9, encode_s=0.0, decode_s=0.0)}
    assert choose(options(0), given, slow).option.up == "int8"


def test_where_encoding_takes_longer_than_sending_nothing_is_encoded() -> None:
    slow = {name: CodecSpeed(share=one.share, encode_s=1e-6, decode_s=1e-6) for name, one in SPEEDS.items()}
    assert choose(options(0), cost(compute_s=0.001, mbit=1000.0), slow).option.up == "raw"


def test_an_estimate_counts_bytes_each_way_and_the_work_of_every_replica() -> None:
    given = cost(compute_s=0.1, mbit=100.0)
    (option,) = (one for one in options(100) if one.up == "onebit" and one.down.startswith("delta:by=int8"))
    found = estimate(option, given, SPEEDS)
    down = 0.26 + (1 - 0.26) / 100
    work_s = 25 * MB * (0.7e-9 * (1 + 2) + 0.5e-9 * (1 + 1 + 1))
    assert found.exchange_s == pytest.approx(given.exchange_s * (0.033 + down) / 2 + work_s)
    assert found.step_s == pytest.approx(0.1 + found.exchange_s)


@pytest.mark.parametrize(("every", "refresh"), [(0, 100), (1000, 100), (50, 50), (7, 7)])
def test_whole_parameters_come_at_every_checkpoint(every: int, refresh: int) -> None:
    downs = [option for option in options(every) if option.refresh]
    assert {option.refresh for option in downs} == {refresh}
    for option in downs:
        check_fit(make_job_spec(checkpoint_every=every, codec_up=option.up, codec_down=option.down))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": "auto", "codec_up": "onebit"}, "give it as `codec` alone"),
        ({"codec_down": "auto"}, "give it as `codec` alone"),
        ({"codec": "auto", "script": True}, "starts the job over with its choice, which a script can't"),
    ],
    ids=str,
)
def test_what_cannot_be_chosen_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        check_fit(make_job_spec(**changes))
    with pytest.raises(JobError, match=r"starts the job over .*, but consistency async has no checkpoint of one step"):
        check_fit(make_job(mode="async", codec="auto"))


# The chief


class Measured(Cluster):
    """Workers report steps of given durations."""

    asked = 0
    """How often the chief asked for the speeds of the codecs."""

    def act(self, action: Action) -> None:
        self.asked += isinstance(action, MeasureCodecs)
        super().act(action)

    def measured(self, speeds: Mapping[str, CodecSpeed]) -> None:
        """The chief's machine has measured them."""
        self.program.measured(speeds, self.now_s)
        self.settle()
        self.tick()

    def train(self, last: int, *, compute_s: float, exchange_s: float) -> None:
        """All steps up to `last`, one by one, unless the job goes back."""
        first, timeline = min(ps.step for ps in self.ps), self.program.state.layout.timeline
        for step in range(first, last):
            if self.program.state.layout.timeline != timeline:
                break
            self.now_s += compute_s + exchange_s
            for ps in self.ps:
                ps.advance(step + 1)
            for worker, replicas in (("worker/0", (0, 1)), ("worker/1", (2, 3))):
                reports = tuple(
                    StepReport(
                        step=step, replica=r, loss=1.0, samples=1, compute_s=compute_s / 2, exchange_s=exchange_s
                    )
                    for r in replicas
                )
                self.beat(worker, steps=reports)
        self.tick()


class MortalMeasured(Measured, Mortal):
    """The chief may die."""

    def __init__(self, **fields: Any) -> None:
        self.configured: list[Configure] = []
        super().__init__(**fields)

    def carry_out(self, command: Command) -> None:
        if isinstance(command.order, Configure):
            self.configured.append(command.order)
        super().carry_out(command)


def started(**fields: object) -> Measured:
    cluster = Measured(job=make_job(codec="auto", steps=1000, **fields))
    cluster.start()
    return cluster


def chosen(cluster: Cluster) -> tuple[str, str, str]:
    job = cluster.program.state.job
    assert job is not None
    return job.codec, job.codec_up, job.codec_down


def test_a_slow_link_takes_the_job_back_to_its_start_with_codecs_that_stay_if_they_are_faster() -> None:
    cluster = started()
    cluster.train(LEAST_STEPS + 2, compute_s=0.1, exchange_s=4.0)
    assert cluster.asked == 1 and chosen(cluster) == ("auto", "", "")
    before = cluster.program.state.layout.timeline
    cluster.measured(SPEEDS)
    assert chosen(cluster) == CHOSEN
    assert phase(cluster) is Phase.RUNNING and cluster.program.state.layout.timeline > before
    assert [ps.step for ps in cluster.ps] == [0, 0]
    assert not cluster.program.state.losses.recoveries
    # Reports that were under way are of the timeline before.
    late = StepReport(step=LEAST_STEPS + 2, replica=0, loss=1.0, samples=1, compute_s=0.05, exchange_s=4.0)
    cluster.beat("worker/0", steps=(late,))
    cluster.train(60, compute_s=0.1, exchange_s=0.3)
    assert "0.4 s, 4.1 s without a codec: the choice stands" in cluster.text()
    assert chosen(cluster) == CHOSEN and [ps.step for ps in cluster.ps] == [60, 60]
    assert sum("codec auto" in say.sentence for say in cluster.said) == 2


def test_a_choice_that_makes_steps_slower_is_taken_back_once() -> None:
    cluster = started()
    cluster.train(LEAST_STEPS + 2, compute_s=0.1, exchange_s=4.0)
    cluster.measured(SPEEDS)
    cluster.train(12, compute_s=0.1, exchange_s=5.0)
    assert chosen(cluster) == ("raw", "", "")
    assert [ps.step for ps in cluster.ps] == [0, 0]
    cluster.train(40, compute_s=0.1, exchange_s=4.0)
    assert [ps.step for ps in cluster.ps] == [40, 40] and phase(cluster) is Phase.RUNNING


def test_a_job_that_computes_is_left_alone() -> None:
    cluster = started()
    cluster.train(40, compute_s=1.0, exchange_s=0.1)
    cluster.measured(SPEEDS)
    assert chosen(cluster) == ("auto", "", "") and [ps.step for ps in cluster.ps] == [40, 40]
    assert "no codec would save a fifth of it, so none is used" in cluster.text()


def test_a_loss_in_between_starts_the_measurement_anew() -> None:
    cluster = started()
    cluster.train(LEAST_STEPS + 2, compute_s=0.1, exchange_s=4.0)
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2)
    cluster.measured(SPEEDS)
    assert chosen(cluster) == ("auto", "", "")
    cluster.restart_ps(1)
    cluster.tick()
    cluster.train(LEAST_STEPS + 2, compute_s=0.1, exchange_s=4.0)
    assert cluster.asked == 2
    cluster.measured(SPEEDS)
    assert chosen(cluster) == CHOSEN


def test_a_chief_that_is_started_again_with_the_same_job_file_keeps_the_choice() -> None:
    cluster = MortalMeasured(job=make_job(codec="auto", steps=1000))
    cluster.start()
    cut(cluster, 0)
    cluster.train(LEAST_STEPS + 2, compute_s=0.1, exchange_s=4.0)
    cluster.measured(SPEEDS)
    cluster.next_chief()
    cluster.hear()
    assert chosen(cluster) == CHOSEN and phase(cluster) is Phase.RUNNING


@pytest.mark.parametrize("kill_in", range(30))
def test_whenever_the_chief_dies_servers_and_workers_agree_on_the_codecs(kill_in: int) -> None:
    cluster = MortalMeasured(job=make_job(codec="auto", steps=1000))
    cluster.start()
    cut(cluster, 0)
    cluster.train(LEAST_STEPS + 2, compute_s=0.1, exchange_s=4.0)
    cluster.kill_in = kill_in
    with contextlib.suppress(Killed):
        cluster.measured(SPEEDS)
        cluster.kill_in = -1
    cluster.next_chief()
    cluster.hear()
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    job = cluster.program.state.job
    assert job is not None
    configured = [order.job for order in cluster.configured]
    assert (configured[-1].codec_up, configured[-1].codec_down) == (job.codec_up, job.codec_down)


def test_without_a_checkpoint_and_without_speeds_nothing_is_chosen() -> None:
    cluster = started()
    cluster.train(LEAST_STEPS + 2, compute_s=0.1, exchange_s=4.0)
    cluster.measured({})
    assert "the codecs could not be measured, so none is used" in cluster.text()
    bare = started()
    bare.train(LEAST_STEPS + 2, compute_s=0.1, exchange_s=4.0)
    bare.program.state.saves.checkpoint_step = -1
    bare.measured(SPEEDS)
    assert "there is no checkpoint to go back to, so none is used" in bare.text()
    assert chosen(bare) == chosen(cluster) == ("auto", "", "") and phase(bare) is Phase.RUNNING


def test_few_steps_and_short_times_decide_nothing() -> None:
    cluster = started()
    cluster.train(LEAST_STEPS - 1, compute_s=1.0, exchange_s=LEAST_S)
    assert not cluster.asked
    quick = started()
    quick.train(100, compute_s=0.01, exchange_s=0.05)
    assert not quick.asked


def test_a_task_that_still_says_auto_is_admitted_to_the_job_with_its_choice() -> None:
    cluster = started()
    cluster.train(LEAST_STEPS + 2, compute_s=0.1, exchange_s=4.0)
    cluster.measured(SPEEDS)
    job = make_job(codec="auto", steps=1000)
    assert cluster.join("worker", 2, job=job).accepted
    (answer,) = cluster.ask("worker", 3, job=other(job, codec="bf16"))
    assert not answer.accepted and "codec: bf16 here, raw in the job" in answer.reason
