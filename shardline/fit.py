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
        wanted = ", ".join(needs) or "to answer pulls with a point ahead of the parameters"
        raise JobError(
            f"rule {rule} needs {wanted}, and consistency {mode} makes one update of several workers' pushes; "
            "choose consistency='async', or another rule"
        )
    if rule.takes is Takes.DELTA and not cadence.of(job).sends_deltas:
        raise JobError(f"rule {rule} takes deltas of parameters, and cadence {job.cadence} sends gradients; change one")
    if standbys and Need.PULLS in rule.needs:
        raise JobError(
            f"rule {rule} needs {Need.PULLS.value}, of which a standby does not hear; leave out --standbys, or choose "
            "another rule"
        )
