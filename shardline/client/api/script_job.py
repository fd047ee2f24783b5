"""A script's job and its named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardline import consistency, methods
from shardline.codecs import without_zeros
from shardline.core.settings import KINDS, REFUSE, Setting, Settings, check, known, read
from shardline.core.spec import ConsistencySpec, JobSpec
from shardline.errors import TensorError, UsageError
from shardline.fit import check_fit, divide
from shardline.model import check_extra_state, make_gradients_dense, model_tensors, pretrained, sparse_weights
from shardline.update import check_tensors, rule_from_optimizer

SETTABLE = tuple(name for name in known() if name not in ("replicas", "batch_size", "accumulate", "steps", "threads"))
"""Settings of a script's job; the others follow from the cluster and the script itself."""


@dataclass(frozen=True, kw_only=True)
class ScriptSettings:
    """Settings of a script's job besides model and optimizer."""

    name: str = "script"
    consistency: ConsistencySpec = field(default_factory=ConsistencySpec)
    rule: str = "torch"
    """Update rule, as parsed by RULES of shardline.update."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Settings of shardline.core.settings that differ from their defaults."""


def choose_settings(given: Mapping[str, Any], environ: Callable[[str], str | None]) -> dict[str, Setting]:
    """A script's settings in canonical form: its arguments, else the environment.

    Raises UsageError for a name that a script can't set, JobError for an invalid value or method.
    """
    for name in given:
        if name not in SETTABLE:
            raise UsageError(f"connect() has no setting {name!r}; the settings are {', '.join(SETTABLE)}")
    found: dict[str, Setting] = {}
    for name in SETTABLE:
        value, text = given.get(name), environ(name)
        if value is None and text is not None:
            value = read(name, text, KINDS[name])
        if value is not None:
            found[name] = methods.canonical(name, value) if name in methods.FIELDS else value
    check(Settings(**found), "connect()")  # type: ignore[arg-type]
    return found


def script_spec(
    script: ScriptSettings,
    workers: int,
    model: nn.Module | Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> JobSpec:
    """The job of the user's own script. Raises JobError for a model or optimizer that can't be trained.

    workers: number in the cluster spec; each is one replica if the replicas' gradients make an update together.
    """
    mode = consistency.of(script.consistency)
    rule = rule_from_optimizer(optimizer, method=script.rule)
    module = model if isinstance(model, nn.Module) else TensorHolder(model)
    make_gradients_dense(module)
    settings = dict(script.settings)
    check_extra_state(module, str(settings.get("extra_state", REFUSE)))
    tensors = model_tensors(module, optimizer.param_groups, rule=rule)
    check_tensors(rule, tensors)
    job = JobSpec(
        name=script.name,
        tensors=tensors,
        rule=rule,
        consistency=script.consistency,
        **{
            **settings,
            "replicas": mode.contributors(workers),
            "threads": torch.get_num_threads(),
        },  # type: ignore[arg-type]
        script=True,
        pretrained=pretrained(model),
    )
    job = divide(replace(job, tensors=without_zeros(job, tensors, sparse_weights(module))))
    check_fit(job)
    return job


def check_named(values: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
    """Raise TensorError for a gradient of an unknown name, or with another shape or dtype than its tensor."""
    for name, gradient in gradients.items():
        if name not in values:
            raise TensorError(f"the job has no tensor {name!r}; it has {', '.join(list(values)[:8])}")
        held = values[name]
        if gradient.shape != held.shape or gradient.dtype != held.dtype:
            raise TensorError(
                f"gradient for {name!r} has shape {tuple(gradient.shape)} and dtype {gradient.dtype}, the "
                f"parameter has {tuple(held.shape)} and {held.dtype}; was it computed with a different model?"
            )


class TensorHolder(nn.Module):
    """Named tensors as a module, so that the same code describes models and bare tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._held = dict(tensors)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The tensors; their names may contain dots."""
        yield from self._held.items()  # type: ignore[misc]  # bare tensors are trained like parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for _, tensor in self.named_parameters():
            yield tensor
