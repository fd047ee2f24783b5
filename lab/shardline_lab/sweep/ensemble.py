"""A sweep's models together: their average is scored as each of them is, and written as one module."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from shardline.checkpoint import Checkpoint, find_checkpoint
from shardline.checkpoint.export import save, values
from shardline.ensemble import Ensemble
from shardline.host.process import resolve_device, torch_threads
from shardline.job import Job
from shardline.model import load_values
from shardline_lab.sweep import fleet
from shardline_lab.sweep.member import RESULT, MemberHistory, SweepMember, finite, told

FOLDER, MODULE = "ensemble", "ensemble.safetensors"


@dataclass(kw_only=True, eq=False)
class EnsembleMember(SweepMember):
    """The average of models, as one more of the sweep: where they train, it loads their best checkpoints.

    settings: "average", as Ensemble takes it.
    """

    members: Sequence[SweepMember]

    @property
    def name(self) -> str:
        return f"mean of {len(self.members)}"

    def train(self, device: str, share: float) -> None:
        """Score the average and write the module; result.json says how that ended. share: not used."""
        best = self.members[0].found
        history, begun_s = MemberHistory(metric=best.metric, lowest=best.lowest), time.monotonic()
        try:
            with torch_threads(self.job.threads):
                models, state = [], {}
                for number, member in enumerate(self.members):
                    stored = find_checkpoint(member.best_checkpoint)
                    tensors = values(stored)
                    models.append(built(member.job, stored, tensors))
                    state.update({f"members.{number}.{name}": tensor for name, tensor in tensors.items()})
                ensemble = Ensemble(models, self.settings["average"]).to(resolve_device(device))
                history.scores.append((0, finite(self.job.score(ensemble))))
                save(state, self.folder.with_name(MODULE))
        except Exception as error:
            history.failure = told(error)
        history.seconds = time.monotonic() - begun_s
        self.write(history)


def built(job: Job, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The model of a job as it was at a checkpoint, on the CPU. tensors: the checkpoint's."""
    model = job.build_model()
    load_values(model, tensors, checkpoint.rows)
    return model


def forget(out: Path) -> None:
    """Remove what an earlier command has made of the same models."""
    for old in (out / FOLDER / RESULT, out / MODULE):
        old.unlink(missing_ok=True)


def averaged(ranked: Sequence[SweepMember], most: int, average: str, place: str, out: Path) -> EnsembleMember:
    """The average of the best models, `most` of them or all that have succeeded, scored. average: as Ensemble takes it.

    place: the device. ranked: the best first. With fewer than two, its history says so.
    """
    members = [member for member in ranked if not member.found.failure][:most]
    first, *others = (name for name, _ in ranked[0].point)
    one = EnsembleMember(
        point=((first, f"mean of {len(members)}"), *((name, "") for name in others)),
        settings={"average": average},
        job=ranked[0].job,
        folder=out / FOLDER,
        members=members,
    )
    one.found.failure = f"an average takes 2 models, and {len(members)} of {len(ranked)} have succeeded"
    if len(members) > 1:
        [*fleet.train([one], 1.0, [place])]
    return one
