"""`shardline export --hf`: a checkpoint as the folder that from_pretrained() of transformers or of peft reads."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from shardline.checkpoint import Checkpoint, find_checkpoint
from shardline.errors import UsageError


def export(path: Path, out: Path, *, best: bool = False) -> Checkpoint:
    """Write a checkpoint as the libraries themselves write a model: config and weights, or of peft the adapters alone.

    path, best: see shardline.checkpoint.find_checkpoint(). out: the folder, which must not be there yet. Returns the
    checkpoint. Raises UsageError if its model is none of transformers, or the folder can't be written, CheckpointError
    if the checkpoint can't be read.
    """
    if out.exists():
        raise UsageError(f"{out} is there already; name a folder that is not")
    checkpoint = find_checkpoint(path, best=best)
    if not checkpoint.job.pretrained:
        raise UsageError(
            f"{checkpoint.path} does not say how its model is made: it is no PreTrainedModel of transformers and no "
            "PeftModel on one, or was written by an earlier version; export to a file, for load_state_dict()"
        )
    model = _filled(json.loads(checkpoint.job.pretrained), checkpoint)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True) as folder:
            model.save_pretrained(Path(folder, out.name))
            os.rename(Path(folder, out.name), out)
    except OSError as error:
        raise UsageError(f"{out} can't be written: {error.strerror or error}") from error
    return checkpoint


def _filled(made: dict[str, Any], checkpoint: Checkpoint) -> Any:
    """The model with the checkpoint's values. It is made without memory, and takes theirs."""
    transformers = _library("transformers")
    kind: Any = getattr(transformers, made["model"], None)
    if kind is None or not issubclass(kind, transformers.PreTrainedModel):
        raise UsageError(
            f"transformers {transformers.__version__} has no model {made['model']!r}; install the version that the job "
            "was trained with, or, for a class of your own, export to a file, for load_state_dict()"
        )
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(made["config"]))
        for number, (name, settings) in enumerate(made["adapters"].items()):
            peft = _library("peft")
            config = peft.PeftConfig.from_peft_type(**settings)
            if number:
                model.add_adapter(name, config)
            else:
                model = peft.get_peft_model(model, config, adapter_name=name)
    try:
        model.load_state_dict(checkpoint.state_dict(), assign=True)
    except RuntimeError as error:
        raise UsageError(f"{checkpoint.path} does not fit the {made['model']} of its job: {error}") from error
    return model


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"--hf needs {name}, which can't be imported ({error}): pip install {name}") from error
