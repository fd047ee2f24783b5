"""Codec delta: who has which step gets what, errors never add up, and what a job refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardline.codecs.base import MemoryKey, Turn
from shardline.codecs.coding import MEASURED_EVERY, BucketCoding, Coding
from shardline.codecs.delta import Delta
from shardline.core.plan import make_plan
from shardline.core.reduce import is_finite
from shardline.core.spec import TensorSpec
from shardline.errors import JobError, ProtocolError
from shardline.fit import check_fit
from tests.support.cluster import Cluster
from tests.support.jobs import Wide, make_job

ELEMENTS = 4096
PLAN = make_plan([TensorSpec(name="w", shape=(64, 64), dtype="float32")], 1)
Memory = dict[MemoryKey, torch.Tensor]


class Sender:
    """A server whose parameters change at random, and what it remembers."""

    def __init__(self, codec: Delta) -> None:
        self.written: BucketCoding = Coding(codec, PLAN).bucket(0, 0)
        self.memory: Memory = {}
        self.generator = torch.Generator().manual_seed(3)
        self.values = torch.randn(ELEMENTS, generator=self.generator)
        self.step = self.changed = 0

    def advance(self, *, changes: bool = True) -> None:
        self.step += 1
        if changes:
            self.values = self.values + 0.01 * torch.randn(ELEMENTS, generator=self.generator)
            self.changed = self.step

    def send(self, base: int | None, step: int | None = None) -> bytearray:
        step = self.step if step is None else step
        turn = Turn(step, receiver="worker/0", base=base, changed=self.changed, memory=self.memory)
        return bytearray(self.written.coder.encode(self.values, turn))


class Receiver:
    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.memory: Memory = {}
        self.have: int | None = None
        self.nbytes = 0

    def pull(self, step: int | None = None) -> torch.Tensor:
        step = self.sender.step if step is None else step
        payload = self.sender.send(self.have, step)
        self.nbytes = len(payload)
        self.have = step
        return self.sender.written.coder.decode(payload, Turn(step, memory=self.memory))


def test_every_receiver_has_the_same_and_errors_do_not_add_up() -> None:
    sender = Sender(Delta(by="bf16", refresh=1000))
    one, two = Receiver(sender), Receiver(sender)
    for step in range(60):
        values = one.pull()
        assert torch.equal(values, two.pull())
        assert one.nbytes == two.nbytes == (4 * ELEMENTS if step == 0 else 2 * ELEMENTS + 8)
        # Half a unit in the last place of what was sent now, whatever was rounded before.
        assert float((values - sender.values).abs().max()) < 0.1 * 2**-8
        assert len(one.memory) == 1 and len(sender.memory) <= 4
        sender.advance()


def test_who_comes_late_gets_all_of_it_and_who_is_a_step_behind_its_change() -> None:
    sender = Sender(Delta(by="bf16", refresh=1000))
    ahead, behind = Receiver(sender), Receiver(sender)
    for one in (ahead, behind):
        one.pull()
    sender.advance()
    first = ahead.pull()
    sender.advance()
    second = ahead.pull()
    # The server holds the values of a step until every worker has read them; the change was made before.
    assert torch.equal(behind.pull(1), first) and behind.nbytes < 4 * ELEMENTS
    assert torch.equal(behind.pull(2), second) and behind.nbytes < 4 * ELEMENTS
    late = Receiver(sender)
    assert torch.equal(late.pull(), second) and late.nbytes == 4 * ELEMENTS
    for _ in range(2):
        sender.advance()
        ahead.pull()
    assert torch.equal(behind.pull(), ahead.pull()) and behind.nbytes == 4 * ELEMENTS


@pytest.mark.parametrize("by", ["bf16", "powersgd"])
def test_a_refresh_depends_on_nothing_before_it(by: str) -> None:
    ends = []
    for begins in (0, 20):
        sender = Sender(Delta(by=by, refresh=20))
        receiver = Receiver(sender)
        while sender.step < 25:
            if sender.step >= begins:
                values = receiver.pull()
                if sender.step % 20 == 0:
                    assert torch.equal(values, sender.values)
            sender.advance()
        ends.append(receiver.pull())
    assert torch.equal(*ends)


def test_a_change_begins_where_the_one_before_ended_and_owes_nothing_twice() -> None:
    sender = Sender(Delta(by="powersgd", refresh=4))
    kept = []
    for _ in range(6):
        sender.send(sender.step - 1 if sender.step else None)
        kept.append(sorted(what for _, step, what in sender.memory if step == sender.step))
        sender.advance()
    changed = ["change", "start 0/basis", "value"]
    assert kept == [["value"], changed, changed, changed, ["value"], changed]


@pytest.mark.parametrize("by", ["int8", "sparse"])
def test_who_relays_hands_on_the_same_changes(by: str) -> None:
    sender = Sender(Delta(by=by, refresh=4))
    relay, straight = Sender(Delta(by=by, refresh=4)), Receiver(sender)
    through, late = Receiver(relay), Receiver(relay)
    for changes in (True, True, False, True, True, True, False, True):
        payload = sender.send(sender.step - 1 if sender.step else None)
        turn = Turn(sender.step, relays=True, memory=relay.memory)
        relay.values = sender.written.coder.decode(payload, turn)
        relay.step, relay.changed = sender.step, sender.changed
        values = straight.pull()
        assert torch.equal(through.pull(), values) and through.nbytes == straight.nbytes
        assert torch.equal(Receiver(relay).pull(), values) and len(relay.memory) <= 4
        if sender.step % 2:
            # It has the values of two steps before.
            assert torch.equal(late.pull(), values) and late.nbytes == values.nbytes
        sender.advance(changes=changes)


def test_an_unchanged_bucket_keeps_what_receivers_have_whoever_asks_for_it() -> None:
    ends = []
    for newcomers in (False, True):
        sender = Sender(Delta(by="bf16", refresh=1000))
        receiver = Receiver(sender)
        for changes in (True, True, False, True, False, False, True):
            values = receiver.pull()
            sender.advance(changes=changes)
            if newcomers:
                assert torch.equal(Receiver(sender).pull(), values) is not changes
        ends.append(receiver.pull())
        assert not torch.equal(ends[-1], sender.values)
    assert torch.equal(*ends)


def test_who_has_an_unchanged_bucket_needs_it_again_at_a_refresh() -> None:
    codec = Delta(by="bf16", refresh=20)
    assert codec.memory.keeps(18, 19) and codec.memory.keeps(20, 39) and codec.memory.keeps(5, 5)
    assert not codec.memory.keeps(19, 20) and not codec.memory.keeps(19, 41) and not codec.memory.keeps(None, 5)
    sender = Sender(codec)
    receiver = Receiver(sender)
    for step in range(20):
        receiver.pull()
        sender.advance(changes=step < 19)
    assert torch.equal(receiver.pull(), sender.values)


def test_a_change_that_overflows_is_sent_as_a_whole() -> None:
    sender = Sender(Delta(by="fp16", refresh=1000))
    receiver = Receiver(sender)
    receiver.pull()
    sender.advance()
    sender.values[7] = 1e5
    assert torch.equal(receiver.pull(), sender.values)
    sender.advance()
    assert float((receiver.pull() - sender.values).abs().max()) < 1e-2


def test_values_that_are_not_finite_pass_and_are_not_remembered() -> None:
    sender = Sender(Delta(by="bf16"))
    receiver = Receiver(sender)
    receiver.pull()
    good = sender.values
    sender.advance()
    sender.values[5] = float("nan")
    assert receiver.pull()[5].isnan()
    assert all(is_finite(values) for memory in (sender.memory, receiver.memory) for values in memory.values())
    sender.values = good
    sender.advance()
    assert torch.equal(receiver.pull(), sender.values)


def test_changes_that_cannot_be_meant_are_refused() -> None:
    sender = Sender(Delta(by="bf16"))
    receiver = Receiver(sender)
    receiver.pull()
    sender.advance()
    change = sender.send(0)
    decode = sender.written.coder.decode
    with pytest.raises(ProtocolError, match="a change of step 0, of which this task has nothing"):
        decode(change, Turn(1))
    other: Memory = {("", 0, "value"): torch.zeros(ELEMENTS)}
    with pytest.raises(ProtocolError, match="a change of step 0, of which this task has other values"):
        decode(change, Turn(1, memory=dict(other)))
    with pytest.raises(ProtocolError, match="3 bytes are too few for a change"):
        decode(change[:3], Turn(1, memory=receiver.memory))
    with pytest.raises(ProtocolError, match="expected 8192"):
        decode(change[:-1], Turn(1, memory=receiver.memory))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"refresh": 0}, "refresh is 0; give a number of steps, at least 1"),
        ({"by": "raw"}, "changes can't be encoded by 'raw'; give the name of a codec, without settings: bf16"),
        ({"by": "topk:ratio=0.1"}, "changes can't be encoded by 'topk:ratio=0.1'; give the name of a codec, without"),
        ({"by": "delta"}, "changes can't be encoded by 'delta'"),
        ({"by": "zip"}, "changes can't be encoded by 'zip'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(JobError, match=said):
        Delta(**settings)  # type: ignore[arg-type]


def test_a_job_that_it_does_not_suit_is_refused() -> None:
    job = make_job("sgd", codec_down="delta:refresh=20", checkpoint_every=40)
    spec = job.spec(job.build_model())
    with pytest.raises(JobError, match="in consistency async workers have no common steps"):
        check_fit(replace(spec, consistency=replace(spec.consistency, mode="async")))
    with pytest.raises(JobError, match="every 20 steps, but checkpoint_every is 50; make that a multiple"):
        check_fit(replace(spec, checkpoint_every=50))
    with pytest.raises(JobError, match="which standbys do not; leave out --standbys"):
        check_fit(spec, standbys=1)


def test_a_sender_measures_the_error_of_what_receivers_have() -> None:
    sender = Sender(Delta(by="bf16", refresh=1000))
    receiver, coding = Receiver(sender), Coding(Delta(by="bf16", refresh=1000), PLAN)
    receiver.pull()
    while sender.step < MEASURED_EVERY:
        sender.advance()
        values = receiver.pull()
    payload = sender.send(sender.step - 1)
    assert len(payload) < 4 * ELEMENTS
    assert coding.measure(0, 0, sender.values, payload, Turn(sender.step, memory=sender.memory))
    off = float(torch.linalg.vector_norm(values - sender.values) / torch.linalg.vector_norm(sender.values))
    assert coding.relative_error == pytest.approx(off, rel=1e-3)


def test_a_job_trains_past_the_step_that_is_measured() -> None:
    job = make_job("sgd", steps=MEASURED_EVERY + 2, codec_down="delta:by=bf16")
    with Cluster(job, ps=1) as cluster:
        (worker,) = cluster.train([[0, 1, 2]])
        assert worker.trainer.step == job.steps


def test_what_is_drawn_for_a_change_depends_on_the_seed_of_the_job() -> None:
    job, ends = make_job(model=Wide, steps=3, replicas=1, seed=1, codec_down="delta:by=qsgd"), []
    for seed in (1, 1, 2):
        with Cluster(job, ps=1) as cluster:
            coding = cluster.hosts[0].store.coding.pull
            assert coding.seed == 1
            coding.seed = seed
            cluster.train([[0]])
            ends.append(cluster.state().params["rows.weight"])
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])
