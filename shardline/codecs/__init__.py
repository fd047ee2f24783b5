"""Codecs: how a bucket's numbers are encoded for transfer. A new one is one file and an entry in CODECS."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardline.codecs.auto import Auto, undecided
from shardline.codecs.base import Codec, Direction, Memory
from shardline.codecs.cast import Bf16, Fp16
from shardline.codecs.coding import JobCodec, JobCoding, pulled, pushed
from shardline.codecs.delta import Delta
from shardline.codecs.lossless import Lossless
from shardline.codecs.low_rank import PowerSGD
from shardline.codecs.quantizing.fp8 import FP8
from shardline.codecs.quantizing.int8 import Int8
from shardline.codecs.quantizing.onebit import EFSign, OneBit
from shardline.codecs.quantizing.onebit_adam import OneBitAdam
from shardline.codecs.quantizing.qsgd import QSGD
from shardline.codecs.quantizing.sign_vote import SignVote
from shardline.codecs.quantizing.ternary import TernGrad, TwoBit
from shardline.codecs.raw import Raw
from shardline.codecs.rows import PLAIN
from shardline.codecs.sparse.dgc import DGC
from shardline.codecs.sparse.nonzero import Sparse
from shardline.codecs.sparse.randomk import RandomK
from shardline.codecs.sparse.topk import TopK
from shardline.core.plan import Plan
from shardline.core.settings import EXACT, Settings
from shardline.core.spec import JobSpec, TensorKind, TensorSpec
from shardline.errors import JobError
from shardline.seams import Table

CODECS: Table[Codec] = Table(
    "codec",
    Raw,
    Auto,
    Bf16,
    Fp16,
    Delta,
    Lossless,
    Sparse,
    Int8,
    FP8,
    QSGD,
    TernGrad,
    TwoBit,
    OneBit,
    EFSign,
    SignVote,
    TopK,
    RandomK,
    DGC,
    PowerSGD,
    OneBitAdam,
)


def fitting(field: str) -> list[str]:
    """Names of the codecs that a field of a job may have: codec_up, codec_down, codec_parcels."""
    other = {"codec_up": Direction.PULL, "codec_down": Direction.PUSH}.get(field)
    return [kind.name for kind in CODECS if (_for_parcels(kind) if other is None else kind.direction is not other)]


def _for_parcels(kind: type[Codec]) -> bool:
    try:
        return not _needs(kind())
    except (TypeError, JobError):
        # It has a setting without a default value: nobody knows before it is chosen.
        return True


def of(job: Settings) -> JobCodec:
    """A job's codecs, with those of its tensors if it has any.

    Raises JobError for one that does not exist, or not in its direction.
    """
    found = {}
    for field, other in (("codec_up", Direction.PULL), ("codec_down", Direction.PUSH)):
        text = getattr(job, field)
        codec = CODECS.parse(text or job.codec)
        if text and codec.direction is other:
            what = {"codec_up": "gradients", "codec_down": "parameters"}[field]
            raise JobError(
                f"{field} is {text!r}, which does not encode {what}; choose from {', '.join(fitting(field))}"
            )
        found[field] = codec
    others = [CODECS.parse(text) for text in job.tensor_codecs] if isinstance(job, JobSpec) else []
    return JobCodec(
        ups=(pushed(found["codec_up"]), *map(pushed, others)), downs=(pulled(found["codec_down"]), *map(pulled, others))
    )


def of_parcels(job: Settings) -> Codec:
    """The codec of activations and their gradients between stages.

    Raises JobError for one that does not exist, and for one that does more than encode the numbers at hand: activations
    of different samples have nothing in common that it could remember.
    """
    found = CODECS.parse(job.codec_parcels or PLAIN.name)
    needed = _needs(found)
    if needed:
        raise JobError(
            f"codec_parcels is {str(found)!r}, which needs {needed}, but activations and their gradients are encoded "
            f"each by itself; choose from {', '.join(fitting('codec_parcels'))}"
        )
    return found


def _needs(codec: Codec) -> str:
    """What a codec needs besides the numbers that it encodes; "" = nothing."""
    if codec.memory is not Memory.NONE or codec.has_momentum:
        return "a memory of what it has sent"
    if codec.direction is Direction.PULL:
        return "values that the receiver already has"
    if codec.at_server.votes:
        return "several replicas that vote"
    return "a chief that chooses" if undecided(codec) else ""


def assigned(tensors: Iterable[TensorSpec], choices: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    """Tensors with the codecs that a job chooses for them, by pattern of their names; the first that matches counts.

    Raises JobError for a pattern that matches no trained tensor.
    """
    found = tuple(tensors)
    trained = [tensor.name for tensor in found if tensor.kind in (TensorKind.PARAM, TensorKind.TABLE)]
    for pattern in choices:
        if not fnmatch.filter(trained, pattern):
            raise JobError(
                f"codec_tensors has the pattern {pattern!r}, which matches none of the {len(trained)} trained tensors: "
                f"{', '.join(trained[:5])}{', ...' if len(trained) > 5 else ''}"
            )

    def choice(tensor: TensorSpec) -> str:
        chosen = (codec for pattern, codec in choices.items() if fnmatch.fnmatchcase(tensor.name, pattern))
        return next(chosen, "") if tensor.name in trained else ""

    return tuple(replace(tensor, codec=choice(tensor)) for tensor in found)


def without_zeros(job: Settings, tensors: Iterable[TensorSpec], names: Iterable[str]) -> tuple[TensorSpec, ...]:
    """A job's tensors, with codec `sparse` for those of these names whose codec the job leaves open."""
    open_ = {job.codec, job.codec_up, job.codec_down} <= {"", PLAIN.name}
    meant = {*names} if open_ else set()
    return tuple(
        replace(tensor, codec=Sparse.name)
        if tensor.name in meant and tensor.kind is TensorKind.PARAM and not tensor.codec
        else tensor
        for tensor in tensors
    )


def coding_of(choice: str | Codec | Settings, plan: Plan) -> JobCoding:
    """A job's codecs for its plan, or one codec for both directions. Raises JobError for one that does not exist."""
    if isinstance(choice, Settings):
        return JobCoding(of(choice), plan, seed=choice.seed)
    return JobCoding(CODECS.parse(choice), plan)


def sent_whole(job: Settings, step: int) -> bool:
    """Whether the push before this step has all that is owed (error_memory="exact"): a planned checkpoint follows."""
    every = job.checkpoint_every
    return step == job.steps or bool(every and step % every == 0)


def owes_at(job: JobSpec, step: int) -> bool:
    """Whether replicas may owe something at a checkpoint of this step, which a job that is resumed from it lacks."""
    return of(job).remembers and step > 0 and not (job.error_memory == EXACT and sent_whole(job, step))


def keep_whole(codecs: JobCodec, tensors: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """A job's tensors, with those marked whole that its codecs can't encode in pieces."""
    return tuple(replace(tensor, whole=True) if codecs.wants_whole(tensor) else tensor for tensor in tensors)


__all__ = ["CODECS", "Codec", "JobCodec", "assigned", "coding_of", "keep_whole", "of", "of_parcels", "without_zeros"]
