"""shardline check: a job's first steps in one plain PyTorch process and through servers, compared bit by bit."""

from shardline.comparison.checked_job import CheckedJob, checked_job
from shardline.comparison.difference import Difference, differences
from shardline.comparison.plain import PlainTraining
from shardline.comparison.served import InProcessCluster, train_served

__all__ = [
    "CheckedJob",
    "Difference",
    "InProcessCluster",
    "PlainTraining",
    "checked_job",
    "differences",
    "train_served",
]
