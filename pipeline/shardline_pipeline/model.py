"""A model as a list of layers that is cut into stages, and the tensors of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from shardline.core.parcel import only_input
from shardline.errors import JobError
from shardline_pipeline.balance import balanced
from shardline_pipeline.hosts import hosts_of
from shardline_pipeline.split.model import Split
from shardline_pipeline.staged import StagedModel, wanted_stages

if TYPE_CHECKING:
    from shardline_pipeline.partition.profile import Profile


class Pipeline(nn.Sequential, StagedModel):
    """Layers that run one after another; `pipeline` of the job says how workers share them.

        Pipeline([nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)], stages=[2])

    stages: the layers that begin a new stage, ascending: [2] makes the stages of layers 0 and 1, and from 2 on. A whole
    number makes that many stages of about equally many parameters. "auto:4" makes 4 that take about equally long, by
    flops and bytes, when a job builds the model; "auto" as many as its cluster has workers for each replica. A layer
    gets what the one before has returned: a tensor, or a tuple of tensors as one argument. workers: how many workers
    each stage has, [2, 1, 1], or which, by number, [[0], [1], [0]]; () lets the chief choose. One process runs the
    model like a torch nn.Sequential of the same layers, with the same names in its state_dict.

    Raises JobError, naming the layer, for a cut that is no layer, a stage without parameters, more stages than layers,
    and weights that layers of different stages share.
    """

    cuts_option = "Pipeline: stages"

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        stages: int | str | Sequence[int],
        workers: Sequence[int | Sequence[int]] = (),
    ) -> None:
        super().__init__(*layers)
        for number, layer in enumerate(layers):
            if not isinstance(layer, nn.Module):
                raise JobError(f"Pipeline: layer {number} is a {type(layer).__name__}; it must be a torch.nn.Module")
        self._cuts: tuple[int, ...] | None = None
        if isinstance(stages, str):
            self.automatic = stages
            self.hosts = hosts_of(workers, wanted_stages(stages, self.cuts_option) or len(workers))
        else:
            cuts = self._balanced(stages) if isinstance(stages, int) else [int(cut) for cut in stages]
            self.hosts = hosts_of(workers, len(cuts) + 1)
            self.cut(cuts)

    def in_layers(self) -> nn.Sequential:
        return self

    def begin_with(self, layers: Sequence[int], profile: Profile) -> None:
        self.cut(layers)
        self.profile = profile

    def cut(self, cuts: Sequence[int]) -> None:
        """Begin stages with these layers. Raises JobError, see Pipeline."""
        self._cuts = tuple(self._checked(list(cuts)))
        homes: dict[int, tuple[str, int]] = {}
        for name, tensor in (
            *self.named_parameters(remove_duplicate=False),
            *self.named_buffers(remove_duplicate=False),
        ):
            layer = int(name.partition(".")[0])
            first, home = homes.setdefault(id(tensor), (name, layer))
            if self.stage_of(home) != self.stage_of(layer):
                raise JobError(
                    f"Pipeline: {first!r} of {self.name_of(home)} is also {name!r} of {self.name_of(layer)}, but "
                    f"stages {self.stage_of(home)} and {self.stage_of(layer)} can't share weights; cut the model so "
                    "that both are in one stage, give each its own, or use Pipeline.split, which hands them on"
                )
        for stage in range(self.num_stages):
            if not any(True for number in self.span(stage) for _ in self[number].parameters()):
                raise JobError(f"Pipeline: {self.where(stage)}, has no parameters; cut the model elsewhere")

    @property
    def cuts(self) -> tuple[int, ...]:
        """First layer of each stage but stage 0. Raises JobError for stages="auto" before a job has built the model."""
        if self._cuts is None:
            raise self._unsettled()
        return self._cuts

    @staticmethod
    def split(
        model: nn.Module,
        example_inputs: Any,
        *,
        cuts: str | Sequence[str],
        example_kwargs: Mapping[str, Any] | None = None,
        workers: Sequence[int | Sequence[int]] = (),
    ) -> Split:
        """A model that is no sequence of layers, cut before some of its modules.

            Pipeline.split(model, torch.zeros(8, 3, 32, 32), cuts=["blocks.2", "blocks.4"])

        What a later stage needs of any earlier one, such as a skip connection, goes from stage to stage; a weight that
        several stages use (tied) as well, from the first one, to which its gradients come back. state_dict has the
        model's own names, and in one process the model itself runs. It is traced by torch.export and cut by
        torch.distributed.pipelining; see https://docs.pytorch.org/docs/stable/export.html.

        example_inputs: what the job's loss calls the model with, for one microbatch: a tensor or a tuple, with the very
        shapes and dtypes. example_kwargs: inputs by name. Those that are no tensors must have these values. cuts: names
        of modules, as in named_modules(), each called once per forward pass; "auto:4" or "auto" finds some, as
        Pipeline's stages. workers: see Pipeline.

        Raises JobError for names that are no modules. A model that can't be traced, and cuts that make no stages, raise
        JobError before training starts, if the job has a pipeline.
        """
        return Split(model, example_inputs, example_kwargs or {}, cuts, workers)

    @property
    def num_stages(self) -> int:
        return len(self.cuts) + 1

    def span(self, stage: int) -> range:
        ends = (0, *self.cuts, len(self))
        return range(ends[stage], ends[stage + 1])

    def stage_of(self, layer: int) -> int:
        return sum(cut <= layer for cut in self.cuts)

    def run(self, stage: int, *inputs: Any, **named: Any) -> Any:
        """The output of one stage. Raises JobError for inputs that no sequence of layers takes."""
        values = only_input(inputs, named)
        for number in self.span(stage):
            values = self[number](values)
        return values

    def end_of(self, stage: int) -> str:
        return self.name_of(self.span(stage)[-1])

    def stage_of_tensor(self, name: str) -> int:
        return self.stage_of(int(name.partition(".")[0]))

    def name_of(self, layer: int) -> str:
        """A layer for messages: "layer 3 (Linear)"."""
        return f"layer {layer} ({type(self[layer]).__name__})"

    def where(self, stage: int) -> str:
        span = self.span(stage)
        return f"stage {stage}, {self.name_of(span[0])} to {self.name_of(span[-1])}"

    def _balanced(self, stages: int) -> list[int]:
        if stages < 1:
            raise JobError(f"Pipeline: stages is {stages}; give a whole number >= 1, or the layers that begin a stage")
        sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in self]
        heavy = [number for number, size in enumerate(sizes) if size]
        if stages > len(heavy):
            raise JobError(
                f"Pipeline: {stages} stages of {len(sizes)} layers, of which {len(heavy)} have parameters; each stage "
                f"needs one, so give at most {max(1, len(heavy))} stages"
            )
        # A stage begins with a layer that has parameters, and has at least one.
        found = balanced([0, *heavy[1:], len(sizes)], stages, lambda _, first, end: (float(sum(sizes[first:end])), 0.0))
        assert found is not None, "there are as many layers as stages"
        return found

    def _checked(self, cuts: list[int]) -> list[int]:
        if len(cuts) >= len(self):
            raise JobError(f"Pipeline: {len(cuts) + 1} stages of {len(self)} layers; each stage needs a layer")
        for before, cut in zip([0, *cuts], cuts, strict=False):
            if not before < cut < len(self):
                raise JobError(
                    f"Pipeline: stages is {cuts}, but {cut} does not begin a stage: give layers from 1 to "
                    f"{len(self) - 1}, ascending"
                )
        return cuts
