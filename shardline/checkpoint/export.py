"""A checkpoint as one plain state_dict that PyTorch can load without Shardline."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shardline.checkpoint.files import os_text
from shardline.checkpoint.manifest import MANIFEST, step_folder
from shardline.checkpoint.reader import Checkpoint
from shardline.checkpoint.store import BEST, LATEST, committed_steps, marked_best, newest_valid
from shardline.errors import CheckpointError, UsageError
from shardline.host import files

SUFFIXES = (".safetensors", ".pt")


def find_checkpoint(path: Path, *, best: bool = False) -> Checkpoint:
    """The checkpoint in a step's folder, or the newest valid one in a folder of checkpoints or a run's --out.

    path: may also name the files `best` or `latest` in the folder of checkpoints. best: the best one instead of the
    newest. Verifies its checksums. Raises CheckpointError if there is none.
    """
    if path.name in (BEST, LATEST) and path.is_file():
        path, best = path.parent, path.name == BEST
    if (path / MANIFEST).exists() and not best:
        return _verified(path)
    for folder in (path, path / "checkpoints"):
        if not committed_steps(folder):
            continue
        if not best:
            return newest_valid(folder)
        marked = marked_best(folder)
        if marked is None:
            raise CheckpointError(
                f"no checkpoint in {folder} is marked as the best: none was scored; leave out --best, or train with an "
                "evaluator and a job that has `evaluate`"
            )
        return _verified(folder / step_folder(marked.step))
    what = "is not a checkpoint and does not contain one" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{path} {what}; give the folder of a step (step-00000100), or the folder that contains the checkpoints"
    )


def _verified(path: Path) -> Checkpoint:
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    return checkpoint


def export(checkpoint_path: Path, out: Path, *, best: bool = False) -> Checkpoint:
    """Write all values under their state_dict names, including aliases of tied weights and persistent buffers.

    Of each table, `<table>.ids` (int64 [n]) and `<table>.rows` (float32 [n, dim]), by part and id: see core.rows.

    `.pt`: torch.save; aliases share storage; load with torch.load(weights_only=True). `.safetensors`: the format has no
    shared storage, so aliases are copies; load_state_dict(load_file(out), strict=True) finds every name.
    best: see find_checkpoint. Returns the exported checkpoint. Raises UsageError for another suffix or an unwritable
    `out`, and CheckpointError if the checkpoint can't be read.
    """
    if out.suffix not in SUFFIXES:
        raise UsageError(f"{out} ends in {out.suffix!r}; it must end in {' or '.join(SUFFIXES)}")
    checkpoint = find_checkpoint(checkpoint_path, best=best)
    save(values(checkpoint), out)
    return checkpoint


def values(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """All values of a checkpoint by name, those of tables too; an alias is the same tensor object as its original."""
    state = checkpoint.state_dict()
    for name, pieces in checkpoint.flat_tables().items():
        if name in state:
            raise UsageError(f"{name!r} is both a tensor of the model and of a table; give the table another name")
        state[name] = torch.cat([*pieces])
    return state


def save(state: Mapping[str, torch.Tensor], out: Path) -> None:
    """Write a state_dict to a .pt or .safetensors file, whole or not at all; raises as export() does."""
    if out.suffix == ".safetensors":
        # Each name with a tensor of its own. Raises UsageError for a dtype that safetensors lacks.
        for name, tensor in state.items():
            if tensor.dtype is torch.complex128:
                raise UsageError(f"tensor {name!r} is complex128, which .safetensors can't store; export to .pt")
        owners = {id(tensor): name for name, tensor in state.items()}
        state = {name: one if owners[id(one)] == name else one.clone() for name, one in state.items()}
    try:
        # Both libraries open files by name and follow links. A folder of our own contains none.
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True) as folder:
            temporary = Path(folder, out.name)
            if out.suffix == ".pt":
                torch.save(dict(state), temporary)
            else:
                save_file(dict(state), temporary, metadata={"format": "pt"})
            files.sync(temporary)
            os.replace(temporary, out)
        files.sync(out.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = os_text(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UsageError(f"{out} can't be written: {cause}") from error
