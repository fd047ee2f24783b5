"""The chief's state machine: what follows from each event in each stage.

`rows` is its table. The rows of an event are tried in order, each against the stage at that moment; if a rule returns
True, it has handled the event, and the remaining rows are skipped. Events that a rule emits (State.emit) are handled as
soon as it has returned; then the servers are given what they lack (reconcile.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardline_chief.rules import events as on
from shardline_chief.rules.codecs.choice import CodecChoice
from shardline_chief.rules.codecs.error_memory import ErrorMemory
from shardline_chief.rules.events import (
    ANY,
    ENDED,
    ENDING,
    PREPARATION,
    RECOVERY,
    START,
    TAKEOVER,
    TRAINING,
    UNHEARD,
    Event,
    Stage,
)
from shardline_chief.rules.flows.checkpointing import Checkpointing
from shardline_chief.rules.flows.ending import Ending
from shardline_chief.rules.flows.failover import Failover
from shardline_chief.rules.flows.joining import Joining
from shardline_chief.rules.flows.leasing import Leasing
from shardline_chief.rules.flows.recovery import Recovery
from shardline_chief.rules.flows.scoring import Scoring
from shardline_chief.rules.flows.servers import Servers
from shardline_chief.rules.flows.start import Start
from shardline_chief.rules.flows.takeover import Takeover
from shardline_chief.rules.flows.workers import Workers
from shardline_chief.rules.reconcile import Reconcile
from shardline_chief.rules.state.state import State

Rule = Callable[[Any, float], bool | None]
Row = tuple[frozenset[Stage], Rule]
Rows = Mapping[type[Event], tuple[Row, ...]]


class Flows:
    """The rules, each with those that it builds on."""

    def __init__(self, state: State) -> None:
        self.checkpointing = Checkpointing(state)
        self.scoring = Scoring(state)
        self.ending = Ending(state, self.checkpointing, self.scoring)
        self.reconcile = Reconcile(state, self.checkpointing, self.ending)
        self.start = Start(state, self.reconcile)
        self.leasing = Leasing(state)
        self.workers = Workers(state)
        self.servers = Servers(state)
        self.failover = Failover(state, self.reconcile)
        self.recovery = Recovery(state, self.reconcile, self.failover)
        self.memory = ErrorMemory(state, self.recovery, self.ending)
        self.codec_choice = CodecChoice(state, self.recovery)
        self.takeover = Takeover(state, self.recovery)
        self.joining = Joining(state, self.start, self.takeover)


def at(*stages: Stage) -> frozenset[Stage]:
    """A set of stages, for the tables below."""
    return frozenset(stages)


def rows(flows: Flows) -> Rows:
    """The rules for each event, by stage. ENDED is in no row that would change anything."""
    return {**_of_time(flows), **_of_tasks(flows), **_of_servers(flows), **_of_checkpoints(flows)}


def _of_time(flows: Flows) -> Rows:
    """Time, and whatever may let the job end."""
    start, reconcile, recovery = flows.start, flows.reconcile, flows.recovery
    workers, takeover, ending = flows.workers, flows.takeover, flows.ending
    return {
        on.Tick: (
            (ANY, workers.links),
            (at(Stage.HEARING), takeover.wait),
            (at(Stage.FINDING), recovery.wait_for_checkpoint),
            (at(Stage.PLACING), recovery.place),
            (ANY - ENDED, recovery.count_anew),
            (TRAINING, flows.failover.watch),
            (at(Stage.GATHERING), start.gather),
            (ANY, reconcile.retry),
            (at(Stage.FIRST_CUT), reconcile.first_cut_late),
            (START | PREPARATION | RECOVERY, start.wait),
            (TRAINING | TAKEOVER, workers.alone),
            (ANY, workers.uneven),
            (ANY, flows.servers.poll),
        ),
        on.Progressed: (
            (TRAINING, flows.memory.moved),
            (at(Stage.CHOOSING, Stage.REACHING), flows.memory.moved_at_end),
            (TRAINING, flows.codec_choice.look),
            (TRAINING, flows.leasing.end_if_complete),
            (TRAINING, ending.end_as_remembered),
            # From the last stage to the first, so that each event advances the ending by one stage.
            (at(Stage.SCORING), flows.scoring.scoring),
            (at(Stage.CUTTING), ending.cutting),
            (at(Stage.REACHING), ending.reaching),
            (at(Stage.CHOOSING), ending.choosing),
        ),
    }


def _of_tasks(flows: Flows) -> Rows:
    start, workers, recovery, takeover = flows.start, flows.workers, flows.recovery, flows.takeover
    return {
        on.Arrived: (
            (at(Stage.GATHERING), start.gather),
            (at(Stage.NOTHING_LEFT), start.nothing_left),
            (at(Stage.READY), start.run),
        ),
        on.TrainerLost: (
            (at(Stage.INITIALIZING), flows.reconcile.initializer_lost),
            (TRAINING, flows.memory.worker_lost),
            (ANY, workers.lost),
        ),
        on.Fenced: ((ANY, workers.fenced),),
        on.Known: ((ANY, flows.joining.admit),),
        on.StrangerLost: ((ANY, workers.stranger_lost),),
        on.ServerLost: (
            (UNHEARD, takeover.server_lost),
            (START, workers.server_lost),
            (ANY - UNHEARD - START, recovery.lost),
        ),
    }


def _of_servers(flows: Flows) -> Rows:
    """Reports and refusals of servers, and their readiness."""
    start, reconcile, checkpointing = flows.start, flows.reconcile, flows.checkpointing
    recovery, failover = flows.recovery, flows.failover
    return {
        on.ShardsTold: (
            (ANY, failover.told),
            (at(Stage.FIRST_CUT), reconcile.first_cut_told),
            (TRAINING | TAKEOVER, checkpointing.observe),
            (TRAINING, flows.scoring.observe),
            (TRAINING | ENDING, checkpointing.told),
        ),
        on.OrderAnswered: (
            (at(Stage.ASKING), flows.takeover.answered),
            (ANY, reconcile.answered),
            (ANY, checkpointing.taken),
            (ENDING, flows.ending.answered),
            (at(Stage.COUNTING), flows.scoring.counted),
        ),
        on.OrderRefused: ((ANY, failover.refused), (ANY, recovery.refused), (ANY, flows.servers.refused)),
        on.ServersReady: ((at(Stage.READY), start.run), (at(Stage.ADOPTING), flows.takeover.adopted)),
        on.TrainingBegins: ((ANY, recovery.goes_on), (ANY, start.began)),
    }


def _of_checkpoints(flows: Flows) -> Rows:
    ending = flows.ending
    return {
        on.CheckpointSaved: (
            (ANY, flows.checkpointing.saved),
            (at(Stage.FIRST_CUT), flows.reconcile.first_cut_saved),
            (at(Stage.CUTTING), ending.saved),
        ),
        on.CodecsMeasured: ((ANY, flows.codec_choice.measured),),
        on.CheckpointFound: ((at(Stage.FINDING), flows.recovery.found),),
        on.EndAsked: (
            (TAKEOVER, ending.remember),
            (ENDING, ending.second_reason),
            (TRAINING, ending.begin),
            (START | PREPARATION | RECOVERY, ending.end_at_once),
        ),
    }


class Machine:
    """Applies the table to a job."""

    def __init__(self, state: State, flows: Flows) -> None:
        self.state = state
        self._rows = rows(flows)
        self._turn = flows.reconcile.turn

    def handle(self, event: Event, now_s: float) -> None:
        """Apply the rules for an event, and for the events that these emit."""
        for stages, rule in self._rows[type(event)]:
            if self.state.stage not in stages:
                continue
            done = rule(event, now_s)
            self.settle(now_s)
            if done:
                return

    def settle(self, now_s: float) -> None:
        """Handle the events that rules have emitted, then give the servers what they lack."""
        while True:
            while self.state.events:
                self.handle(self.state.events.popleft(), now_s)
            self._turn(now_s)
            if not self.state.events:
                return
