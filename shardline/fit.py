"""Compatibility of the methods that a job chooses. The only code that uses two seams at once. Pure."""

from __future__ import annotations

from dataclasses import replace

from shardline import cadence, codecs, consistency, division
from shardline.cadence import Cadence, Sends
from shardline.codecs.auto import undecided
from shardline.codecs.base import Codec, Memory
from shardline.consistency import Clock, Consistency
from shardline.core.settings import EXACT, SERVER, WORKER
from shardline.core.spec import InnerSpec, JobSpec, ScheduleSpec, TensorKind
from shardline.errors import JobError
from shardline.update import Torch, check_rule, check_tensors, chosen, rule
from shardline.update.arguments import momentum
from shardline.update.base import Need, Takes, UpdateRule


def divide(job: JobSpec) -> JobSpec:
    """The job with its optimizer where the cadence runs it, and the rule that its codec of pushes needs, if any.

    If the cadence trains locally, the job's optimizer, schedule and clipping become JobSpec.inner, and `rule` the SGD
    that the servers run, with the same parameter groups; tensors get their fragments. Raises JobError naming what can't
    be run on workers.
    """
    if job.apply == WORKER:
        job = _applied(job)
    found = cadence.of(job)
    if found.outer_rule is None:
        return _with_server_rule(job)
    if not chosen(job.rule).runs_optimizer:
        raise JobError(
            f"update rule {job.rule.method} changes gradients on the servers, but cadence {found} runs the optimizer "
            "on the workers; choose rule='torch', or another cadence"
        )
    if job.consistency.nan_policy == "skip":
        raise JobError(
            f"nan_policy 'skip' would leave a NaN in the optimizer that cadence {found} runs on each worker; choose "
            "'stop', or another cadence"
        )
    mode = consistency.of(job.consistency)
    if mode.clock is Clock.VERSION and job.schedule != ScheduleSpec():
        raise JobError(
            f"the {job.schedule.kind} schedule counts updates in consistency {mode}, but the optimizer that cadence "
            f"{found} runs on each worker knows only its own rounds; leave the schedule out, or choose "
            "consistency='sync'"
        )
    return replace(
        job,
        tensors=cadence.fragmented(found, job.tensors),
        rule=rule("SGD", [found.outer_rule] * len(job.rule.groups)),
        schedule=ScheduleSpec(),
        consistency=replace(job.consistency, clip_norm=0.0),
        inner=InnerSpec(rule=job.rule, schedule=job.schedule, clip_norm=job.consistency.clip_norm),
    )


def _applied(job: JobSpec) -> JobSpec:
    """A job whose workers run the optimizer: on what servers sum, or where nothing is summed, each by itself.

    Raises JobError naming a choice that this has no meaning with.
    """
    mode, pace = consistency.of(job.consistency), cadence.of(job)
    if mode.by_stage:
        raise JobError(
            f"with apply 'worker' each worker of a stage runs the optimizer on the sum of all its replicas, but "
            f"consistency {mode} makes none; choose consistency='sync', or leave `apply` out"
        )
    if pace.outer_rule is not None:
        raise JobError(
            f"apply 'worker' is what cadence {pace} does anyway: it runs the optimizer on each worker; leave `apply` "
            "out, or choose cadence='every-step'"
        )
    if not chosen(job.rule).runs_optimizer:
        raise JobError(
            f"update rule {job.rule.method} changes gradients on the servers, but with apply 'worker' these only sum; "
            "choose rule='torch', or leave `apply` out"
        )
    if not mode.pulls_by_step:
        if job.schedule != ScheduleSpec():
            raise JobError(
                f"the {job.schedule.kind} schedule counts the updates of all workers in consistency {mode}, and with "
                "apply 'worker' none knows them; leave the schedule out, or choose consistency='sync'"
            )
        # Each worker takes its own step, and the servers add how far it moved.
        return replace(job, apply=SERVER, cadence="local-sgd:every=1")
    if mode.drops_late:
        raise JobError(
            f"with apply 'worker' every worker needs every step, but consistency {mode} goes on without a late one; "
            "choose consistency='sync' without spares, or leave `apply` out"
        )
    if job.consistency.nan_policy == "skip":
        raise JobError(
            "nan_policy 'skip' decides on the servers whether a step counts, but with apply 'worker' the workers take "
            "it; choose nan_policy='stop', or leave `apply` out"
        )
    return job


def _check_applied(job: JobSpec, *, standbys: int) -> None:
    """Refuse what works on parameters where servers have none."""
    bringing = next((one for one in codecs.of(job).ups if one.at_server.rule), None)
    if bringing is not None:
        raise JobError(
            f"codec {bringing} brings a rule for the servers, but with apply 'worker' these only sum; leave `apply` "
            "out, or choose another codec"
        )
    changing = next((one for one in codecs.of(job).downs if one.memory.shared), None)
    if changing is not None:
        raise JobError(
            f"codec {changing} sends how parameters changed, but with apply 'worker' gradients go down; choose another "
            "codec_down, or leave `apply` out"
        )
    if standbys:
        raise JobError(
            "standbys keep parameters and optimizer state, which with apply 'worker' the workers have; leave out "
            "--standbys, or `apply`"
        )


def _with_server_rule(job: JobSpec) -> JobSpec:
    """The job with the update rule that its codec brings along."""
    ups = codecs.of(job).ups
    bringing = next((one for one in ups if one.at_server.rule), None)
    if bringing is None:
        return job
    if len(ups) > 1:
        raise JobError(
            f"codec {bringing} changes what the servers do with all tensors; leave codec_tensors out, or choose "
            "another codec"
        )
    if job.rule.method not in (Torch.name, bringing.at_server.rule):
        raise JobError(
            f"codec {bringing} needs update rule {bringing.at_server.rule}, but the job has {job.rule.method}; leave "
            "`rule` out, or choose another codec"
        )
    found = replace(job, rule=replace(job.rule, method=bringing.at_server.rule))
    check_rule(found.rule)
    check_tensors(found.rule, found.tensors)
    return found


def check_fit(job: JobSpec, *, standbys: int = 0, workers: int | None = None) -> None:
    """Raise JobError if two methods of a job can't work together, naming both and the remedy.

    standbys: planned number per shard. workers: planned number; None = unknown yet.
    """
    rule, mode, pace = chosen(job.rule), consistency.of(job.consistency), cadence.of(job)
    named, parts = consistency.CONSISTENCIES.parse(job.consistency.mode), division.of(job)
    if named not in (named.plain(), parts.consistency(named.plain())):
        raise JobError(
            f"consistency {job.consistency.mode}: in_stages is for pipelines, which set it; leave it out, or choose one"
        )
    codecs.of_parcels(job)
    mode.needed(job.replicas)  # Raises if too few are left to make a step.
    if mode.drops_late:
        _check_dropping(job, mode)
    _check_needs(job, rule, mode)
    if pace.rounds.overlap and mode.clock is Clock.VERSION:
        raise JobError(
            f"cadence {pace} merges what an exchange returns {pace.rounds.overlap} passes later, but in consistency "
            f"{mode} workers have no common steps; choose consistency='sync', or overlap=0"
        )
    if pace.rounds.together and mode.clock is Clock.VERSION:
        raise JobError(
            f"steps of cadence {pace} differ from each other, but in consistency {mode} workers have no common steps; "
            "choose consistency='sync', or another cadence"
        )
    if pace.keeps_copies and mode.sums_pushes:
        raise JobError(
            f"cadence {pace} moves a replica and the servers' parameters by equal amounts, but consistency {mode} "
            "divides what several replicas send; choose consistency='sync' or 'async', or another cadence"
        )
    if rule.takes is Takes.DELTA and pace.sends is not Sends.DELTAS:
        raise JobError(
            f"update rule {rule} takes parameter deltas, but cadence {job.cadence} sends gradients; choose "
            "another rule or cadence"
        )
    if rule.takes is Takes.MOMENTUM and all(one.at_server.rule != job.rule.method for one in codecs.of(job).ups):
        raise JobError(
            f"update rule {rule} takes workers' momentum, but codec {job.codec_up or job.codec} sends gradients; leave "
            "`rule` out: a codec that sends momentum, such as onebit-adam, brings its rule along"
        )
    if job.apply == WORKER:
        _check_applied(job, standbys=standbys)
    _check_down(job, mode, standbys=standbys)
    _check_undecided(job, mode)
    if job.error_memory == EXACT:
        _check_exact(job, mode, pace)
    _check_votes(job, pace)
    adding = next((one for one in codecs.of(job).ups if one.has_momentum), None)
    if adding is not None:
        _check_momentum(adding, job, mode, pace)
    _check_taken(job)
    parts.check(standbys=standbys, workers=workers)
    if standbys and Need.PULLS in rule.needs:
        raise JobError(
            f"update rule {rule} needs {Need.PULLS.value}, which standbys do not receive; leave out --standbys, or "
            "choose another rule"
        )


def _check_needs(job: JobSpec, rule: UpdateRule, mode: Consistency) -> None:
    """Refuse a rule that needs to know a push, where updates are not single pushes."""
    if mode.by_stage:
        if lacking := sorted(need.value for need in rule.needs - {Need.WORKER}):
            raise JobError(
                f"update rule {rule} needs {', '.join(lacking)}, but with consistency {mode} the passes of a pipeline "
                "have several versions, and no server knows which; choose a rule that needs none of it, or "
                "pipeline='whole-model'"
            )
        return
    needs = sorted(need.value for need in rule.needs)
    wanted = ", ".join(needs) or "to answer pulls with values ahead of the parameters"
    single = mode.whole_pushes and (not mode.sums_pushes or rule.share(job.rule, 0) is not None)
    if (needs or rule.looks_ahead) and not single:
        # Updates are sums of several workers' pushes, so there is no single push for the rule.
        raise JobError(
            f"update rule {rule} needs {wanted}, but consistency {mode} combines the pushes of several workers into "
            "one update; choose consistency='async', or another rule"
        )


def _check_exact(job: JobSpec, mode: Consistency, pace: Cadence) -> None:
    """Refuse error_memory='exact' where the bits would depend on deaths all the same."""
    if not mode.consistent_cuts:
        raise JobError(
            f"error_memory 'exact' goes back to a checkpoint of one step, but consistency {mode} has none; choose "
            "error_memory='reset', or consistency='sync'"
        )
    if not codecs.of(job).remembers:
        return
    resting = next((one for one in codecs.of(job).ups if one.at_server.rule), None)
    if resting is not None:
        raise JobError(
            f"error_memory 'exact' clears what workers remember at each checkpoint, also the momentum that codec "
            f"{resting} sends; choose error_memory='reset', or another codec"
        )
    if pace.outer_rule is not None or pace.keeps_copies:
        raise JobError(
            f"error_memory 'exact' doesn't cover what cadence {pace} keeps on each worker, so the bits would depend on "
            "deaths all the same; choose error_memory='reset', or cadence='every-step'"
        )


def _check_undecided(job: JobSpec, mode: Consistency) -> None:
    """Refuse a choice that the chief can't make: it has to measure steps, and to start over with its choice."""
    found = codecs.of(job)
    choosing = next((one for one in (*found.ups, *found.downs) if undecided(one)), None)
    if choosing is None:
        return
    if not found.undecided or any(undecided(one) for one in found.ups[1:]):
        raise JobError(
            f"codec {choosing} chooses for all tensors and both directions: give it as `codec` alone, without "
            "codec_up, codec_down and codec_tensors"
        )
    if not mode.consistent_cuts or job.script:
        where = "a script" if job.script else f"consistency {mode}"
        raise JobError(
            f"codec {choosing} measures some steps and starts the job over with its choice, which {where} can't; "
            "choose a codec: shardline bench codecs and shardline advise show what they save"
        )


def _check_down(job: JobSpec, mode: Consistency, *, standbys: int) -> None:
    """Refuse changes of parameters from step to step where there are no such steps, or where the bits would change."""
    for codec in codecs.of(job).downs:
        _check_changes(codec, job, mode, standbys=standbys)


def _check_changes(codec: Codec, job: JobSpec, mode: Consistency, *, standbys: int) -> None:
    if codec.memory.shared and not mode.pulls_by_step:
        raise JobError(
            f"codec {codec} sends how the parameters changed from step to step, but in consistency {mode} workers have "
            "no common steps; choose another codec_down, or consistency='sync'"
        )
    if codec.memory.reset_every and job.checkpoint_every % codec.memory.reset_every:
        raise JobError(
            f"codec {codec} sends whole parameters every {codec.memory.reset_every} steps, but checkpoint_every is "
            f"{job.checkpoint_every}; make that a multiple, so that a job that goes back to a checkpoint ends in the "
            "same bits"
        )
    if codec.memory.shared and standbys:
        raise JobError(
            f"codec {codec} remembers what receivers have, which standbys do not; leave out --standbys, or choose "
            "another codec_down"
        )


def _check_dropping(job: JobSpec, mode: Consistency) -> None:
    """Refuse methods that keep something on a worker, which would go on as if a dropped gradient counted."""
    if cadence.of(job).keeps_copies:
        raise JobError(
            f"consistency {mode} drops what comes too late, but cadence {job.cadence} keeps parameters of each "
            "replica's own, which would include it; choose another cadence, or consistency='sync' without spares"
        )
    keeping = next((one for one in codecs.of(job).ups if one.memory is not Memory.NONE), None)
    if keeping is not None:
        raise JobError(
            f"consistency {mode} drops what comes too late, but codec {keeping} remembers on each worker what it has "
            "sent, and would count it; choose another codec, or consistency='sync' without spares"
        )


def _check_votes(job: JobSpec, pace: Cadence) -> None:
    """Refuse what has no meaning where only the signs of gradients count."""
    voting = next((one for one in codecs.of(job).ups if one.at_server.votes), None)
    if voting is None:
        return
    clip = job.consistency.clip_norm or (job.inner.clip_norm if job.inner is not None else 0.0)
    if clip:
        raise JobError(
            f"codec {voting} applies signs, whatever the size of gradients, so clip_norm={clip:g} would change "
            "nothing; leave it out, or choose another codec"
        )
    if pace.sends is Sends.DELTAS:
        raise JobError(
            f"codec {voting} applies signs, but cadence {pace} sends how far the parameters moved; choose "
            "cadence='every-step', or another codec"
        )


def _check_taken(job: JobSpec) -> None:
    """Refuse tensors that would go as plain gradients to servers that are set up for something else."""
    found = codecs.of(job)
    for tensor in job.tensors:
        codec = found.of(tensor)[0]
        if (
            tensor.kind is TensorKind.PARAM
            and (codec.at_server.votes or codec.has_momentum)
            and not codec.takes(tensor)
        ):
            what = "signs" if codec.at_server.votes else "gradients with momentum"
            raise JobError(
                f"{tensor.name!r} has dtype {tensor.dtype}, which codec {codec} doesn't encode: it would train by its "
                f"gradient, beside others that train by {what}; choose another codec, or give this tensor one of its "
                "own in codec_tensors"
            )


def _check_momentum(codec: Codec, job: JobSpec, mode: Consistency, pace: Cadence) -> None:
    """Refuse methods that would add momentum to what a codec has already added it to, or take it for a gradient."""
    if pace.sends is Sends.DELTAS:
        raise JobError(
            f"codec {codec} adds momentum to gradients on each worker, but cadence {pace} sends how far the "
            "parameters moved; choose cadence='every-step', or another codec"
        )
    if job.consistency.clip_norm and not mode.clips_at_worker:
        raise JobError(
            f"codec {codec} adds momentum to gradients on each worker, so that clip_norm={job.consistency.clip_norm:g} "
            "would clip momentum on the servers instead of gradients; leave it out, or choose another codec"
        )
    if codec.at_server.rule:
        if mode.clock is Clock.VERSION:
            raise JobError(
                f"codec {codec} sends momentum after some steps, but in consistency {job.consistency.mode} workers "
                "have no common steps; choose consistency='sync', or another codec"
            )
        return
    for number, group in enumerate(job.rule.groups):
        if momentum(group):
            raise JobError(
                f"codec {codec} adds momentum to gradients on each worker, and optimizer {job.rule.name} has "
                f"momentum {momentum(group):g} in parameter group {number} on the servers; set that to 0 (the first of "
                "Adam's betas), or choose another codec"
            )
