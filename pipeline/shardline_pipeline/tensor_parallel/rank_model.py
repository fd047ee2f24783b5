"""A model with its shared layers in parts, by torch's parallelize_module."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from shardline.core.spec import TensorSpec, span_of_part
from shardline.model import named_values
from shardline_pipeline.tensor_parallel import SharedLayer


class RankModel:
    """A worker's tensors where layers are shared, and the module that a rank computes with. Used by one thread.

    model: whole, on the CPU; the weights of its shared layers move into parts, and are of no use there afterwards.
    tensors: of the job. layers: those that are shared.
    """

    def __init__(self, model: nn.Module, tensors: Sequence[TensorSpec], layers: Sequence[SharedLayer]) -> None:
        self._model = model
        self._tensors = tensors
        self._layers = layers
        whole = named_values(model)
        self.values: dict[str, torch.Tensor] = {}
        """The tensors of the plan: those that all ranks have, and the parts of all ranks."""
        for spec in tensors:
            if spec.parts:
                part = whole[spec.part_of].detach().narrow(spec.part_dim, *span_of_part(spec))
                self.values[spec.name] = part.clone(memory_format=torch.contiguous_format)
            else:
                self.values[spec.name] = whole[spec.name]
        for name in {spec.part_of for spec in tensors if spec.parts}:
            # A shape without memory, from which the module of each rank is made.
            whole[name].data = torch.zeros((), dtype=whole[name].dtype).expand(whole[name].shape)
        self._parts: dict[str, TensorSpec] = {}
        """Those of this rank, by the whole tensor's name."""
        self._placements: dict[str, Sequence[Placement]] = {}
        """How the parameters of shared layers lie in the mesh, by name."""

    def module(self, mesh: DeviceMesh) -> nn.Module:
        """The model as this rank of the mesh computes it. It shares memory with `values`."""
        rank = mesh.get_local_rank()
        self._parts = {spec.part_of: spec for spec in self._tensors if spec.parts and spec.part == rank}
        held = [*self._model.parameters(), *self._model.buffers()]
        module = copy.deepcopy(self._model, {id(tensor): tensor for tensor in held})
        styles = {layer.name: _style(layer) for layer in self._layers}
        module = parallelize_module(module, mesh, styles, src_data_rank=None)
        for name, parameter in list(module.named_parameters()):
            if isinstance(parameter, DTensor):
                self._replace(module, name, parameter, mesh)
        return module

    def _replace(self, module: nn.Module, name: str, parameter: DTensor, mesh: DeviceMesh) -> None:
        spec = self._parts.get(name)
        local = self.values[spec.name if spec is not None else name].detach()
        self._placements[name] = parameter.placements
        shared = DTensor.from_local(local, mesh, parameter.placements, run_check=False)
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_parameter(
            leaf, nn.Parameter(shared, requires_grad=parameter.requires_grad)
        )

    def gradients(self, found: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Gradients of the module's parameters by the plan's names, as plain tensors. All ranks call this together."""
        made = {}
        for name, gradient in found.items():
            spec = self._parts.get(name)
            if isinstance(gradient, DTensor):
                gradient = gradient.redistribute(placements=self._placements[name]).to_local()
            made[spec.name if spec is not None else name] = gradient
        return made


def _style(layer: SharedLayer) -> ParallelStyle:
    if layer.style.name == "colwise":
        return ColwiseParallel()
    if layer.style.name == "gathered":
        return ColwiseParallel(output_layouts=Replicate())
    return RowwiseParallel(input_layouts=Replicate()) if layer.embedding else RowwiseParallel()
