"""The stages of a job, as the chief knows them: one at a time, each with the phase that tasks see.

machine.py says what follows from an event in each stage.
"""

from __future__ import annotations

import enum

from shardline.core.orders import Phase


class Stage(enum.Enum):
    """What the chief is doing with the job now."""

    HEARING = enum.auto()
    """Takeover: waiting until each known server has been heard or is known to be gone."""
    ASKING = enum.auto()
    """Takeover: asking the reachable servers what they hold, since standbys may have to be promoted."""
    ADOPTING = enum.auto()
    """Takeover: taking command and comparing what the servers hold with the journal."""

    GATHERING = enum.auto()
    """Start: tasks are missing, or the job is not known yet."""
    NOTHING_LEFT = enum.auto()
    """Start: the checkpoint to resume from has all steps; waiting for the remaining tasks, to tell them so."""

    PREPARING = enum.auto()
    """Preparation: the servers lack some of what the layout wants; reconcile.py says what is next."""
    INITIALIZING = enum.auto()
    """Preparation: a worker sets the first values."""
    FIRST_CUT = enum.auto()
    """Preparation: the checkpoint of step 0 is taken."""
    READY = enum.auto()
    """Preparation: all is ready; waiting for enough tasks that train."""

    TRAINING = enum.auto()

    FINDING = enum.auto()
    """Recovery: waiting for the checkpoint to roll back to, which may still be being written."""
    PLACING = enum.auto()
    """Recovery: waiting for servers that can hold the shards."""

    CHOOSING = enum.auto()
    """Ending: asking for the shards' progress, to choose the stop step."""
    REACHING = enum.auto()
    """Ending: waiting until every shard is at the stop step, or every lease is done."""
    CUTTING = enum.auto()
    """Ending: taking the last checkpoint."""
    SCORING = enum.auto()
    """Ending: waiting for the evaluator."""
    COUNTING = enum.auto()
    """Ending: asking for the last figures."""

    ENDED = enum.auto()
    """Nothing more is decided."""


TAKEOVER = frozenset({Stage.HEARING, Stage.ASKING, Stage.ADOPTING})
"""A restarted chief has not taken command yet: tasks keep their last orders."""
UNHEARD = frozenset({Stage.HEARING, Stage.ASKING})
"""Nothing can be decided yet: it is not known which servers are there, or what they hold."""
START = frozenset({Stage.GATHERING, Stage.NOTHING_LEFT})
PREPARATION = frozenset({Stage.PREPARING, Stage.INITIALIZING, Stage.FIRST_CUT, Stage.READY})
TRAINING = frozenset({Stage.TRAINING})
RECOVERY = frozenset({Stage.FINDING, Stage.PLACING})
ENDING = frozenset({Stage.CHOOSING, Stage.REACHING, Stage.CUTTING, Stage.SCORING, Stage.COUNTING})
ENDED = frozenset({Stage.ENDED})
ANY = frozenset(Stage)
RECONCILED = frozenset({Stage.ASKING, Stage.ADOPTING}) | PREPARATION | TRAINING | ENDING
"""Stages in which servers are given what they lack."""

PHASES: dict[Stage, Phase] = {
    **dict.fromkeys(START, Phase.WAITING),
    **dict.fromkeys(PREPARATION | RECOVERY, Phase.INIT),
    Stage.TRAINING: Phase.RUNNING,
    **dict.fromkeys(ENDING, Phase.STOPPING),
    Stage.ENDED: Phase.ENDED,
}
"""Phase that tasks see in each stage; during a takeover they keep the last chief's."""
