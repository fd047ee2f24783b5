"""The loop of a worker that shares layers with others of its host: each step with all of them, or again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

import shardline_pipeline as pipeline
from shardline.client.api.session import Session
from shardline.client.job_loop import scheduled_steps
from shardline.core.spec import JobSpec, TensorSpec, span_of_part
from shardline.data import BatchSource, replica_gradients
from shardline.errors import JobError
from shardline.host.process import tell_ready
from shardline.job import Job
from shardline.model import named_values
from shardline_pipeline.activations.post import PostOffice
from shardline_pipeline.base import Pass
from shardline_pipeline.model import Pipeline
from shardline_pipeline.runner import StageRunner, Unit
from shardline_pipeline.stage_work import At
from shardline_pipeline.tensor_parallel import SharedLayer, layers_of
from shardline_pipeline.tensor_parallel.team import Team
from shardline_pipeline.tensor_parallel.trial import try_parts
from shardline_pipeline.worker.memory import MemoryCheck


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


class TeamRunner(StageRunner):
    """A StageRunner of each rank of a process group, whose rank 0 says which unit is next."""

    def choose(self, first: Mapping[Unit, tuple[At, Pass]]) -> Unit:
        # What rank 0 has ready, the others have or will get.
        if len(first) > 1:
            units = sorted(first)
            number = torch.tensor([units.index(super().choose(first)) if dist.get_rank() == 0 else 0])
            dist.broadcast(number, src=0)
            chosen = units[int(number)]
            first = {chosen: first[chosen]}
        return super().choose(first)


class RankWorker:
    """A worker's rank in shared layers, also in the stages of a pipeline. Attaches the session to the job's model."""

    def __init__(self, session: Session, job: Job, model: nn.Module, spec: JobSpec, source: BatchSource) -> None:
        if session.device.type != "cpu":
            raise JobError(
                f"workers that share layers compute on CPUs, but this one was given {session.device}; start it with "
                "--device cpu, or train with --set tensor_ranks=1"
            )
        self._session = session
        self._job = job
        self._source = source
        self._schedule = pipeline.of(spec)
        layers = layers_of(job, model)
        try_parts(model, job, layers, pipeline.ranks(spec))
        optimizer = job.build_optimizer(model)
        self._model = RankModel(model, spec.tensors, layers)
        self._optimizer = session.attach(self._model.values, optimizer, job=spec)
        assert isinstance(session.partners, PostOffice), "the job has parts"
        self._office = session.partners
        self._team = Team(session.config.timeouts, self._office.still_ordered)
        self._module = model
        """Of the present team."""
        self._memory = MemoryCheck(session, self._office, model)
        self._runner: TeamRunner | None = None
        """Set if the model has stages."""

    def train(self) -> None:
        """Compute step after step, until the job ends."""
        session = self._session
        self._office.on_interrupt = self._team.interrupt
        tell_ready(session.config.ready_fd, session.link.task)
        try:
            for step in scheduled_steps(session, self._job, self._optimizer):
                with session.attempt():
                    self._gather(step)
                    if self._runner is None:
                        self._compute_replicas(step)
                    else:
                        self._compute_stages(step, self._runner)
                    self._optimizer.step()
        finally:
            self._team.close()

    def _gather(self, step: int) -> None:
        """Have a team for this step. Where a worker has looked for its step again, all of its team do."""
        session, office, team = self._session, self._office, self._team
        self._memory.check()
        if team.mesh is not None and not session.trainer.open.first:
            return
        about = f"timeline {office.timeline}, step {step} of replicas {session.replicas}, stages {office.all_stages()}"
        mesh = team.meet(office.team(), office.rank, about, office.job_secret)
        with team.together():
            self._module = self._model.module(mesh)
        if isinstance(self._module, Pipeline) and self._schedule.staged:
            self._runner = TeamRunner(self._module, self._job, self._source, self._schedule, office)

    # All ranks have the same loss, and what all have is pushed by rank 0: see shardline_pipeline.share_of.

    def _compute_replicas(self, step: int) -> None:
        session = self._session
        for replica in session.replicas:
            session.begin_replica(replica)
            with self._team.together():
                loss, samples = replica_gradients(self._module, self._job, self._source, step, replica)
                named = self._module.named_parameters()
                gradients = self._model.gradients({name: one.grad for name, one in named if one.grad is not None})
            session.contribute(replica, loss=loss, samples=samples, gradients=gradients, keep=True)

    def _compute_stages(self, step: int, runner: TeamRunner) -> None:
        session = self._session
        replicas = session.replicas
        session.begin_replica(min(replicas))
        with self._team.together():
            parts = runner.run(step, {replica: self._office.stages(replica) for replica in replicas})
            gradients = {replica: self._model.gradients(parts[replica].gradients) for replica in replicas}
        for replica in replicas:
            loss = parts[replica].loss
            samples = runner.samples if loss is not None else 0
            session.contribute(replica, loss=loss, samples=samples, gradients=gradients[replica], keep=True)
