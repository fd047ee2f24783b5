"""Simulations of a job: its own mode and rule classes under a virtual clock, with virtual workers and links."""

from __future__ import annotations

from shardline_lab.simulator.links import Network
from shardline_lab.simulator.result import Result
from shardline_lab.simulator.simulation import Contents, Death, Setup, Simulation, StageCosts
from shardline_lab.simulator.stages import PipelineSimulation, simulated
from shardline_lab.simulator.times import Gamma, Measured, Times

__all__ = [
    "Contents",
    "Death",
    "Gamma",
    "Measured",
    "Network",
    "PipelineSimulation",
    "Result",
    "Setup",
    "Simulation",
    "StageCosts",
    "Times",
    "simulated",
]
