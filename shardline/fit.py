"""Compatibility of the methods that a job chooses. The only code that uses two seams at once. Pure."""

from __future__ import annotations

from shardline import cadence, consistency
from shardline.core.spec import JobSpec
from shardline.errors import JobError
from shardline.update import chosen
from shardline.update.base import Need, Takes


def check_fit(job: JobSpec, *, standbys: int = 0) -> None:
    """Raise JobError if two methods of a job can't work together, naming both and the remedy.

    standbys: planned number per shard.
    """
    rule, mode = chosen(job.rule), consistency.of(job.consistency)
    needs = sorted(need.value for need in rule.needs)
    if (needs or rule.looks_ahead) and not mode.whole_pushes:
        # Updates are sums of several workers' pushes, so there is no single push for the rule.
        wanted = ", ".join(needs) or "to answer pulls with values ahead of the parameters"
        raise JobError(
            f"update rule {rule} needs {wanted}, but consistency {mode} combines the pushes of several workers into "
            "one update; choose consistency='async', or another rule"
        )
    if rule.takes is Takes.DELTA and not cadence.of(job).sends_deltas:
        raise JobError(
            f"update rule {rule} takes parameter deltas, but cadence {job.cadence} sends gradients; choose "
            "another rule or cadence"
        )
    if standbys and Need.PULLS in rule.needs:
        raise JobError(
            f"update rule {rule} needs {Need.PULLS.value}, which standbys do not receive; leave out --standbys, or "
            "choose another rule"
        )
