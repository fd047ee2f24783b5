"""Compatibility of the methods that a job chooses. The only code that uses two seams at once. Pure.

What a method needs of the consistency is compared with what that gives (consistency.Gives). The rest are cross rules.
"""

from __future__ import annotations

from dataclasses import replace

from shardline import cadence, codecs, consistency, division, topology
from shardline.cadence import Cadence, Sends
from shardline.codecs.auto import undecided
from shardline.codecs.base import Codec, Memory
from shardline.consistency import Clock, Consistency, Gives
from shardline.core.settings import EXACT, SERVER, WORKER
from shardline.core.spec import InnerSpec, JobSpec, RuleSpec, ScheduleSpec, TensorKind
from shardline.errors import JobError
from shardline.update import (
    ALLOWED,
    Torch,
    check_rule,
    check_tensors,
    chosen,
    is_own,
    rule,
    runs_on_workers,
    weights,
)
from shardline.update.arguments import momentum
from shardline.update.base import Need, UpdateRule


def divide(job: JobSpec) -> JobSpec:
    """The job with its optimizer where the cadence runs it, and the rule that its codec of pushes needs, if any.

    If the cadence trains locally, the job's optimizer, schedule and clipping become JobSpec.inner, and `rule` the SGD
    that the servers run, with the same parameter groups; tensors get their fragments. Raises JobError naming what can't
    be run on workers.
    """
    if job.apply == WORKER:
        job = _applied(job)
    found, mode = cadence.of(job), consistency.of(job.consistency)
    if found.outer_rule is None:
        return _with_server_rule(job)
    _refuse(
        not runs_on_workers(job.rule),
        f"update rule {job.rule.method} changes gradients on the servers, but cadence {found} runs the optimizer on "
        "the workers; choose rule='torch', or another cadence",
    )
    _refuse(
        job.consistency.nan_policy == "skip",
        f"nan_policy 'skip' would leave a NaN in the optimizer that cadence {found} runs on each worker; choose "
        "'stop', or another cadence",
    )
    _refuse(
        mode.clock is Clock.VERSION and job.schedule != ScheduleSpec(),
        f"the {job.schedule.kind} schedule counts updates in consistency {mode}, but the optimizer that cadence "
        f"{found} runs on each worker knows only its own rounds; leave the schedule out, or choose consistency='sync'",
    )
    return replace(
        job,
        tensors=cadence.fragmented(found, job.tensors),
        rule=rule("SGD", [found.outer_rule] * len(job.rule.groups)),
        schedule=ScheduleSpec(),
        consistency=replace(job.consistency, clip_norm=0.0),
        inner=InnerSpec(rule=job.rule, schedule=job.schedule, clip_norm=job.consistency.clip_norm),
    )


def _refuse(clash: bool, sentence: str) -> None:
    if clash:
        raise JobError(sentence)


def _applied(job: JobSpec) -> JobSpec:
    """A job whose workers run the optimizer: on what servers sum, or where nothing is summed, each by itself.

    Raises JobError naming a choice that this has no meaning with.
    """
    mode, pace = consistency.of(job.consistency), cadence.of(job)
    leave = "choose consistency='sync', or leave `apply` out"
    Gives.WHOLE_PUSHES.need(mode, "with apply 'worker' each worker runs the optimizer on a whole step", leave)
    _refuse(
        pace.outer_rule is not None,
        f"apply 'worker' is what cadence {pace} does anyway: it runs the optimizer on each worker; leave `apply` out, "
        "or choose cadence='every-step'",
    )
    _refuse(
        not runs_on_workers(job.rule),
        f"update rule {job.rule.method} changes gradients on the servers, but with apply 'worker' these only sum; "
        "choose rule='torch', or leave `apply` out",
    )
    if mode.clock is Clock.VERSION:
        _refuse(
            job.schedule != ScheduleSpec(),
            f"the {job.schedule.kind} schedule counts the updates of all workers in consistency {mode}, and with "
            "apply 'worker' none knows them; leave the schedule out, or choose consistency='sync'",
        )
        # Each worker takes its own step, and the servers add how far it moved.
        return replace(job, apply=SERVER, cadence="local-sgd:every=1")
    Gives.EVERY_GRADIENT.need(
        mode,
        "with apply 'worker' every worker needs every step",
        "choose consistency='sync' without spares, or leave `apply` out",
    )
    _refuse(
        job.consistency.nan_policy == "skip",
        "nan_policy 'skip' decides on the servers whether a step counts, but with apply 'worker' the workers take it; "
        "choose nan_policy='stop', or leave `apply` out",
    )
    return job


def check_runner(rule: RuleSpec, *, on_workers: bool) -> None:
    """Raise JobError for an optimizer from outside torch, unless workers run it."""
    _refuse(
        is_own(rule.name) and not on_workers,
        f"optimizer {rule.name} is not a class of torch.optim, and parameter servers run no other code; let workers "
        f"run it with apply='worker' (--set apply=worker), or use one of {', '.join(ALLOWED)}",
    )


def _check_applied(job: JobSpec, *, standbys: int) -> None:
    """Refuse what works on parameters where servers have none."""
    bringing = next((one for one in codecs.of(job).ups if one.at_server.rule), None)
    _refuse(
        bringing is not None,
        f"codec {bringing} brings a rule for the servers, but with apply 'worker' these only sum; leave `apply` out, "
        "or choose another codec",
    )
    changing = next((one for one in codecs.of(job).downs if one.memory.shared), None)
    _refuse(
        changing is not None,
        f"codec {changing} sends how parameters changed, but with apply 'worker' gradients go down; choose another "
        "codec_down, or leave `apply` out",
    )
    _refuse(
        standbys > 0,
        "standbys keep parameters and optimizer state, which with apply 'worker' the workers have; leave out "
        "--standbys, or `apply`",
    )


def _with_server_rule(job: JobSpec) -> JobSpec:
    """The job with the update rule that its codec brings along."""
    ups = codecs.of(job).ups
    bringing = next((one for one in ups if one.at_server.rule), None)
    if bringing is None:
        return job
    _refuse(
        len(ups) > 1,
        f"codec {bringing} changes what the servers do with all tensors; leave codec_tensors out, or choose another "
        "codec",
    )
    _refuse(
        job.rule.method not in (Torch.name, bringing.at_server.rule),
        f"codec {bringing} needs update rule {bringing.at_server.rule}, but the job has {job.rule.method}; leave "
        "`rule` out, or choose another codec",
    )
    found = replace(job, rule=replace(job.rule, method=bringing.at_server.rule))
    check_rule(found.rule)
    check_tensors(found.rule, found.tensors)
    return found


def check_fit(job: JobSpec, *, standbys: int = 0, workers: int | None = None) -> None:
    """Raise JobError if two methods of a job can't work together, naming both and the remedy.

    standbys: planned number per shard. workers: planned number; None = unknown yet.
    """
    check_runner(job.rule, on_workers=job.apply == WORKER)
    rule, mode, pace = chosen(job.rule), consistency.of(job.consistency), cadence.of(job)
    named, parts = consistency.CONSISTENCIES.parse(job.consistency.mode), division.of(job)
    _refuse(
        named not in (named.plain(), parts.consistency(named.plain())),
        f"consistency {job.consistency.mode}: in_stages is for pipelines, which set it; leave it out, or choose one",
    )
    codecs.of_parcels(job)
    mode.needed(job.replicas)  # Raises if too few are left to make a step.
    _check_rule(job, rule, mode)
    _check_pace(job, mode, pace)
    if job.apply == WORKER:
        _check_applied(job, standbys=standbys)
    for codec in codecs.of(job).downs:
        _check_changes(codec, job, mode, standbys=standbys)
    _check_undecided(job, mode)
    if job.error_memory == EXACT:
        _check_exact(job, mode, pace)
    _check_votes(job, pace)
    adding = next((one for one in codecs.of(job).ups if one.has_momentum), None)
    if adding is not None:
        _check_momentum(adding, job, mode, pace)
    _check_taken(job)
    if topology.of(job).meets:
        _check_between(job, mode)
    table = next((tensor.name for tensor in job.tensors if tensor.kind is TensorKind.TABLE), "")
    if table:
        _check_table(table, job, pace)
    parts.check(standbys=standbys, workers=workers)
    _refuse(
        standbys > 0 and Need.PULLS in rule.needs,
        f"update rule {rule} needs {Need.PULLS.value}, which standbys do not receive; leave out --standbys, or choose "
        "another rule",
    )


def _check_between(job: JobSpec, mode: Consistency) -> None:
    """Refuse what an aggregator can't do for several workers: it adds up whole gradients, and hands one pull on."""
    who = f"topology {job.topology} has one pull of a step serve several workers"
    Gives.LASTING_VALUES.need(mode, who, "choose topology='flat', or consistency='sync'")
    differing = next((one for one in codecs.of(job).downs if not one.relayable), None)
    _refuse(
        differing is not None,
        f"topology {job.topology} decodes parameters and encodes them again for its workers, which would then have "
        f"other ones than codec {differing} gives; choose topology='flat', or another codec_down",
    )
    _refuse(
        job.apply == WORKER,
        f"topology {job.topology} leaves the optimizer to the servers; choose topology='flat', or apply='server'",
    )
    _refuse(
        division.of(job).partial,
        f"topology {job.topology} is for workers with whole replicas; choose topology='flat' for a pipeline or for "
        "tensor_parallel",
    )


def _check_table(table: str, job: JobSpec, pace: Cadence) -> None:
    """Refuse what needs all of a model's gradients in dense tensors, or at a time that is not the step's."""
    who = f"the model has embedding table {table!r}, whose rows"
    _refuse(
        bool(job.consistency.clip_norm) or job.consistency.nan_policy == "skip",
        f"{who} are not counted in a global norm, nor skipped with a step; leave out clip_norm, and nan_policy='skip'",
    )
    _refuse(
        pace.sends is not Sends.GRADIENTS or pace.rounds.ticks != 1 or bool(pace.rounds.overlap),
        f"{who} are exchanged in every step, but cadence {pace} is not; choose cadence='every-step'",
    )
    _refuse(
        job.apply == WORKER or job.inner is not None,
        f"{who} are updated by the servers' rule; leave out apply='worker'",
    )
    _refuse(
        division.of(job).partial,
        f"{who} are pulled by workers with whole replicas; leave out the pipeline or tensor_parallel",
    )
    _refuse(
        topology.of(job).meets,
        f"{who} come straight from the servers; choose topology='flat'",
    )


def _check_rule(job: JobSpec, rule: UpdateRule, mode: Consistency) -> None:
    """Refuse a rule that needs to know a push, where updates are not single pushes, or that needs other pushes."""
    needs = (rule.needs | ({Need.AHEAD} if rule.looks_ahead else set())) - {Need.MOMENTUM}
    # Where pushes are added up, a rule may weigh each of them.
    told = mode.tells | (needs if Gives.WEIGHED_SUMS in mode.gives and weights(job.rule) else set())
    _refuse(
        not needs <= told,
        f"update rule {rule} needs {', '.join(sorted(need.value for need in needs - told))}, but consistency {mode} "
        "combines the pushes of several workers into one update; choose consistency='async', or another rule",
    )
    _refuse(
        Need.MOMENTUM in rule.needs and all(one.at_server.rule != job.rule.method for one in codecs.of(job).ups),
        f"update rule {rule} takes {Need.MOMENTUM.value}, but codec {job.codec_up or job.codec} sends gradients; leave "
        "`rule` out: a codec that sends momentum, such as onebit-adam, brings its rule along",
    )


def _check_pace(job: JobSpec, mode: Consistency, pace: Cadence) -> None:
    """Refuse rounds, and what is kept on a worker, where steps are not common or a gradient may not count."""
    common = Gives.COMMON_STEPS
    if pace.rounds.overlap:
        merging = f"cadence {pace} merges what an exchange returns {pace.rounds.overlap} passes later"
        common.need(mode, merging, "choose consistency='sync', or overlap=0")
    if pace.rounds.together:
        common.need(
            mode, f"steps of cadence {pace} differ from each other", "choose consistency='sync', or another cadence"
        )
    if pace.keeps_copies:
        Gives.EQUAL_MOVES.need(
            mode,
            f"cadence {pace} moves a replica and the servers' parameters by equal amounts",
            "choose consistency='sync' or 'async', or another cadence",
        )
        Gives.EVERY_GRADIENT.need(
            mode,
            f"cadence {job.cadence} keeps parameters of each replica's own, which would include every gradient",
            "choose another cadence, or consistency='sync' without spares",
        )
    keeping = next((one for one in codecs.of(job).ups if one.memory is not Memory.NONE), None)
    if keeping is not None:
        Gives.EVERY_GRADIENT.need(
            mode,
            f"codec {keeping} remembers on each worker what it has sent, and would count it",
            "choose another codec, or consistency='sync' without spares",
        )


def _check_exact(job: JobSpec, mode: Consistency, pace: Cadence) -> None:
    """Refuse error_memory='exact' where the bits would depend on deaths all the same."""
    Gives.ONE_STEP_CUTS.need(
        mode,
        "error_memory 'exact' goes back to a checkpoint at which no worker has any",
        "choose error_memory='reset', or consistency='sync'",
    )
    if not codecs.of(job).remembers:
        return
    resting = next((one for one in codecs.of(job).ups if one.at_server.rule), None)
    _refuse(
        resting is not None,
        f"error_memory 'exact' clears what workers remember at each checkpoint, also the momentum that codec {resting} "
        "sends; choose error_memory='reset', or another codec",
    )
    _refuse(
        pace.outer_rule is not None or pace.keeps_copies,
        f"error_memory 'exact' doesn't cover what cadence {pace} keeps on each worker, so the bits would depend on "
        "deaths all the same; choose error_memory='reset', or cadence='every-step'",
    )


def _check_undecided(job: JobSpec, mode: Consistency) -> None:
    """Refuse a choice that the chief can't make: it has to measure steps, and to start over with its choice."""
    found = codecs.of(job)
    choosing = next((one for one in (*found.ups, *found.downs) if undecided(one)), None)
    if choosing is None:
        return
    _refuse(
        not found.undecided or any(undecided(one) for one in found.ups[1:]),
        f"codec {choosing} chooses for all tensors and both directions: give it as `codec` alone, without codec_up, "
        "codec_down and codec_tensors",
    )
    starting_over = f"codec {choosing} measures some steps and starts the job over with its choice"
    remedy = "choose a codec: shardline bench codecs and shardline advise show what they save"
    Gives.ONE_STEP_CUTS.need(mode, starting_over, remedy)
    _refuse(job.script, f"{starting_over}, which a script can't; {remedy}")


def _check_changes(codec: Codec, job: JobSpec, mode: Consistency, *, standbys: int) -> None:
    """Refuse changes of parameters from step to step where there are no such steps, or where the bits would change."""
    if codec.memory.shared:
        Gives.COMMON_STEPS.need(
            mode,
            f"codec {codec} sends how the parameters changed from step to step",
            "choose another codec_down, or consistency='sync'",
        )
    every = codec.memory.reset_every
    _refuse(
        every > 0 and job.checkpoint_every % every > 0,
        f"codec {codec} sends whole parameters every {every} steps, but checkpoint_every is {job.checkpoint_every}; "
        "make that a multiple, so that a job that goes back to a checkpoint ends in the same bits",
    )
    _refuse(
        codec.memory.shared and standbys > 0,
        f"codec {codec} remembers what receivers have, which standbys do not; leave out --standbys, or choose another "
        "codec_down",
    )


def _check_votes(job: JobSpec, pace: Cadence) -> None:
    """Refuse what has no meaning where only the signs of gradients count."""
    voting = next((one for one in codecs.of(job).ups if one.at_server.votes), None)
    if voting is None:
        return
    clip = job.consistency.clip_norm or (job.inner.clip_norm if job.inner is not None else 0.0)
    _refuse(
        clip > 0,
        f"codec {voting} applies signs, whatever the size of gradients, so clip_norm={clip:g} would change nothing; "
        "leave it out, or choose another codec",
    )
    _refuse(
        pace.sends is Sends.DELTAS,
        f"codec {voting} applies signs, but cadence {pace} sends how far the parameters moved; choose "
        "cadence='every-step', or another codec",
    )


def _check_taken(job: JobSpec) -> None:
    """Refuse tensors that would go as plain gradients to servers that are set up for something else."""
    found = codecs.of(job)
    for tensor in job.tensors:
        codec = found.of(tensor)[0]
        what = "signs" if codec.at_server.votes else "gradients with momentum" if codec.has_momentum else ""
        _refuse(
            tensor.kind is TensorKind.PARAM and bool(what) and not codec.takes(tensor),
            f"{tensor.name!r} has dtype {tensor.dtype}, which codec {codec} doesn't encode: it would train by its "
            f"gradient, beside others that train by {what}; choose another codec, or give this tensor one of its own "
            "in codec_tensors",
        )


def _check_momentum(codec: Codec, job: JobSpec, mode: Consistency, pace: Cadence) -> None:
    """Refuse methods that would add momentum to what a codec has already added it to, or take it for a gradient."""
    adding = f"codec {codec} adds momentum to gradients on each worker"
    _refuse(
        pace.sends is Sends.DELTAS,
        f"{adding}, but cadence {pace} sends how far the parameters moved; choose cadence='every-step', or another "
        "codec",
    )
    clip = job.consistency.clip_norm
    _refuse(
        clip > 0 and Gives.CLIPS_FIRST not in mode.gives,
        f"{adding}, and clip_norm={clip:g} would clip momentum on the servers instead of gradients; leave it out, or "
        "choose another codec",
    )
    if codec.at_server.rule:
        Gives.COMMON_STEPS.need(
            mode,
            f"codec {codec} sends momentum after some steps",
            "choose consistency='sync', or another codec",
        )
        return
    for number, group in enumerate(job.rule.groups):
        _refuse(
            momentum(group) != 0,
            f"{adding}, and optimizer {job.rule.name} has momentum {momentum(group):g} in parameter group {number} on "
            "the servers; set that to 0 (the first of Adam's betas), or choose another codec",
        )
