"""Whether a model can be computed with its layers in parts: one microbatch, before training, in one process.

The job's loss runs with whole layers, and then as each rank, with that rank's part of every shared weight. What ranks
tell each other is known from the first run, so no other process is needed, and what goes wrong does so at the layer
where it begins: a rowwise layer computes its part of the sum, which is kept, and returns the whole sum.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardline.data import BatchSource, DataSource, checked_loss, derive, seed_everything
from shardline.errors import JobError, ShardlineError, calling
from shardline_pipeline.tensor_parallel import SharedLayer

NEAR, NEAR_HALF = 1e-3, 5e-2
"""Largest difference, as a share of the norm, that is taken for rounding: in float32, and in dtypes of two bytes."""
Forward = Callable[[torch.Tensor], torch.Tensor]


def try_parts(model: nn.Module, job: DataSource, layers: Sequence[SharedLayer], ranks: int) -> None:
    """Raise JobError, naming the layer, if ranks with a part of these layers each compute something else together.

    In evaluation mode, where most models draw no random numbers; one that draws some is not compared, and a loss that
    can't be computed so is not tried. Leaves the model and torch's random generator as they were.
    """
    with torch.random.fork_rng(devices=()):
        batch = BatchSource(job).batch(0, 0, 0)
        trial = _Trial(copy.deepcopy(model).eval(), job, layers, ranks)
        try:
            draws = not torch.equal(trial.run_whole(batch, 1), whole := trial.run_whole(batch, 0))
        except ShardlineError:
            # If training fails too, its first step says so.
            return
        for rank in range(ranks):
            trial.run_rank(batch, rank, None if draws else whole)
        if not draws:
            trial.check_sums()


class _Trial:
    """What shared layers compute, whole and in parts. model: is changed meanwhile."""

    def __init__(self, model: nn.Module, job: DataSource, layers: Sequence[SharedLayer], ranks: int) -> None:
        self._model = model
        self._job = job
        self._layers = layers
        self._ranks = ranks
        self._whole: dict[str, list[torch.Tensor]] = {}
        """What each whole layer has returned, call by call."""
        self._sums: dict[tuple[str, int], torch.Tensor] = {}
        """What the ranks have computed of a rowwise layer, without its bias, by layer and call."""

    def run_whole(self, batch: Any, seed: int) -> torch.Tensor:
        self._whole = {layer.name: [] for layer in self._layers}

        def noting(layer: SharedLayer, plain: Forward) -> Forward:
            def forward(given: torch.Tensor) -> torch.Tensor:
                output = plain(given)
                self._whole[layer.name].append(output.detach().clone())
                return output

            return forward

        with self._forward(noting):
            return self._loss(batch, seed)

    def run_rank(self, batch: Any, rank: int, whole: torch.Tensor | None) -> None:
        """Compute as one rank. whole: the loss that has to come out; None = it is random. Raises JobError."""
        calls = {layer.name: 0 for layer in self._layers}

        def as_rank(layer: SharedLayer, plain: Forward) -> Forward:
            def forward(given: torch.Tensor) -> torch.Tensor:
                number = calls[layer.name]
                calls[layer.name] += 1
                if number == len(self._whole[layer.name]):
                    raise JobError(f"{layer} is called more often than in the whole model")
                known = self._whole[layer.name][number]
                if layer.embedding:
                    return known.clone().requires_grad_()
                return self._told(layer, plain(given), known, rank, number, compare=whole is not None)

            return forward

        try:
            with self._in_parts(rank), self._forward(as_rank):
                loss = self._loss(batch, 0)
        except _DifferentError as error:
            raise JobError(str(error)) from None
        except ShardlineError as error:
            raise JobError(
                f"{error}; this is with 1/{self._ranks} of {self._named} as a worker has it (tensor_parallel): what "
                "is between a colwise layer and its rowwise one has to take sizes from what it gets, and weights of "
                "shared layers are used by calling these only; or leave them out of tensor_parallel"
            ) from error
        if whole is not None and not _near(loss, whole):
            raise JobError(
                f"loss(model, batch) is {float(whole):.6g} with whole layers, but {float(loss):.6g} with "
                f"1/{self._ranks} of {self._named} as a worker has it (tensor_parallel): something uses their weights "
                "otherwise than by calling these layers, as a penalty over all parameters does; use the optimizer's "
                "weight_decay, or leave such layers out of tensor_parallel"
            )

    def _told(
        self, layer: SharedLayer, output: torch.Tensor, known: torch.Tensor, rank: int, number: int, *, compare: bool
    ) -> torch.Tensor:
        if layer.style.takes_parts:
            bias = self._model.get_submodule(layer.name).bias
            part = output.detach() - (bias.detach() if isinstance(bias, torch.Tensor) else 0.0)
            before = self._sums.get((layer.name, number))
            self._sums[layer.name, number] = part if before is None else before + part
        elif compare and not _near(output, _part(known, -1, rank, self._ranks)):
            raise _DifferentError(self._differs(layer))
        # Whole values, but of the rank's own computation as far as autograd is concerned.
        return output if layer.style.leaves_parts else known + 0.0 * output.sum()

    def check_sums(self) -> None:
        """Raise JobError for the first rowwise layer of which the ranks' parts do not make the whole."""
        for layer in self._layers:
            for number, known in enumerate(self._whole[layer.name]):
                found = self._sums.get((layer.name, number))
                if found is None:
                    continue
                bias = self._model.get_submodule(layer.name).bias
                if not _near(found + (bias.detach() if isinstance(bias, torch.Tensor) else 0.0), known):
                    raise JobError(self._differs(layer))

    def _differs(self, layer: SharedLayer) -> str:
        return (
            f"{self._ranks} workers with a part each would compute something else than the whole {layer}: what is "
            "between a colwise layer and its rowwise one sees only a part of the last dimension, which a softmax or a "
            "norm does not bear; make both layers 'gathered', or leave them out of tensor_parallel"
        )

    @property
    def _named(self) -> str:
        names = [layer.name for layer in self._layers]
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

    def _loss(self, batch: Any, seed: int) -> torch.Tensor:
        seed_everything(derive(self._job.seed, seed))
        with calling("loss(model, batch)"):
            loss = self._job.loss(self._model, batch)
        loss = checked_loss(loss)
        return loss.detach().clone()

    @contextmanager
    def _forward(self, change: Callable[[SharedLayer, Forward], Forward]) -> Iterator[None]:
        modules = [self._model.get_submodule(layer.name) for layer in self._layers]
        for layer, module in zip(self._layers, modules, strict=True):
            module.forward = change(layer, module.forward)
        try:
            yield
        finally:
            for module in modules:
                del module.forward

    @contextmanager
    def _in_parts(self, rank: int) -> Iterator[None]:
        weights = dict(self._model.named_parameters())
        cuts = {name: dim for layer in self._layers for name, dim in layer.cuts.items() if name in weights}
        whole = {name: weights[name].data for name in cuts}
        for name, dim in cuts.items():
            weights[name].data = _part(whole[name], dim, rank, self._ranks)
        try:
            yield
        finally:
            for name, values in whole.items():
                weights[name].data = values


class _DifferentError(Exception):
    """A layer's part is not a part of what the whole layer computes."""


def _part(values: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    return values.chunk(ranks, dim)[rank]


def _near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.shape != wanted.shape:
        return False
    share = NEAR_HALF if min(found.element_size(), wanted.element_size()) < 4 else NEAR
    found, wanted = found.detach().double(), wanted.detach().double()
    if not bool(wanted.isfinite().all()):
        return True
    return bool((found - wanted).norm() <= share * wanted.norm() + 1e-6)
