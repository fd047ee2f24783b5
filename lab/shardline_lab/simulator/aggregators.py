"""Virtual aggregators: a bucket leaves when all members have contributed to it, and is pulled once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardline.core.reduce import Block, cover
from shardline_lab.simulator.links import MessageStream
from shardline_lab.simulator.servers import PulledBucket, VirtualServer
from shardline_lab.simulator.workers import SimulatedJob, VirtualWorker

Contribution = tuple[VirtualWorker, int, Sequence[Block]]
"""A member, its life, and the blocks of replicas that it has pushed."""


class VirtualAggregator:
    """A task that exchanges with the servers for its members; see shardline_aggregator.sums.

    up, down: streams to and from the servers. sums: bytes of a sum, by server and bucket, in step t at t modulo their
    count. replicas: of the job.
    """

    def __init__(
        self,
        task: str,
        job: SimulatedJob,
        streams: tuple[Sequence[MessageStream], Sequence[MessageStream]],
        sums: Sequence[Sequence[Sequence[float]]],
        replicas: int,
    ) -> None:
        self.task = task
        self.members: dict[VirtualWorker, Mapping[int, MessageStream]] = {}
        """The way back to each, by server."""
        self._job = job
        self._up, self._down = streams
        self._sums = sums
        self._replicas = replicas
        self._open: dict[tuple[int, int], list[Contribution]] = {}

    def take_in(
        self, worker: VirtualWorker, life: int, server: VirtualServer, bucket: int, blocks: Sequence[Block]
    ) -> None:
        """A bucket of a member's push has arrived."""
        held = self._open.setdefault((server.number, bucket), [])
        held.append((worker, life, blocks))
        if len(held) < sum(bool(member.owned) for member in self.members):
            return
        del self._open[server.number, bucket]
        sizes, summed = self._sums[server.number][bucket], {one for member, _, _ in held for one in member.owned}
        nbytes = sizes[worker.step % len(sizes)] * len(cover(summed, self._replicas))
        self._job.tally.push_bytes += nbytes
        self._up[server.number].send(nbytes, self._push, server, bucket, held)

    def _push(self, server: VirtualServer, bucket: int, held: Sequence[Contribution]) -> None:
        for worker, _, blocks in held:
            worker.count(server, bucket, blocks)

        def reply(_: int, answer: PulledBucket | None) -> None:
            assert answer is not None, "the servers keep the values of a step until all have them"
            nbytes = answer.sizes[held[0][0].step % len(answer.sizes)]
            self._job.tally.pull_bytes += nbytes
            self._down[server.number].send(nbytes, self._hand_out, held, answer, nbytes)

        server.pull(bucket, held[0][0].step + 1, self.task, (reply, 0))
        server.settle()

    def _hand_out(self, held: Sequence[Contribution], answer: PulledBucket, nbytes: float) -> None:
        for worker, life, _ in held:
            self.members[worker][answer.server].send(nbytes, worker.take_back, life, answer)
