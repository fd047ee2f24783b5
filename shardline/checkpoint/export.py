"""A checkpoint as one plain state_dict that PyTorch loads with no Shardline installed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shardline.checkpoint.files import os_text
from shardline.checkpoint.manifest import MANIFEST
from shardline.checkpoint.reader import Checkpoint
from shardline.checkpoint.store import committed_steps, newest_valid
from shardline.errors import CheckpointError, UsageError
from shardline.host import files

SUFFIXES = (".safetensors", ".pt")


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a step's folder, or the newest whole one of a folder of checkpoints or of a run's --out.

    Its checksums are compared. Raises CheckpointError where there is none.
    """
    if (path / MANIFEST).exists():
        checkpoint = Checkpoint(path)
        checkpoint.verify()
        return checkpoint
    for folder in (path, path / "checkpoints"):
        if committed_steps(folder):
            return newest_valid(folder)
    what = "is not a checkpoint and contains none" if path.exists() else "does not exist"
    raise CheckpointError(f"{path} {what}; give a step's folder (step-00000100) or the folder of checkpoints")


def export(checkpoint_path: Path, out: Path) -> Checkpoint:
    """Write all values under their state_dict names, aliases of tied weights and persistent buffers included.

    `.pt`: torch.save, aliases share storage, loads with torch.load(weights_only=True). `.safetensors`: the format has
    no shared storage, so an alias is a copy, and load_state_dict(load_file(out), strict=True) finds every name.
    Returns the checkpoint that was exported. Raises UsageError for another suffix or an unwritable `out`, and
    CheckpointError for the checkpoint.
    """
    if out.suffix not in SUFFIXES:
        raise UsageError(f"{out} ends in {out.suffix!r}; it must end in {' or '.join(SUFFIXES)}")
    checkpoint = find_checkpoint(checkpoint_path)
    state = checkpoint.state_dict()
    if out.suffix == ".safetensors":
        state = _separate(checkpoint, state)
    try:
        # Both libraries open by name and follow links. In a folder of our own there are none.
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True) as folder:
            temporary = Path(folder, out.name)
            if out.suffix == ".pt":
                torch.save(state, temporary)
            else:
                save_file(state, temporary, metadata={"format": "pt"})
            files.sync(temporary)
            os.replace(temporary, out)
        files.sync(out.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = os_text(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UsageError(f"{out} can't be written: {cause}") from error
    return checkpoint


def _separate(checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every name with a tensor of its own. Raises UsageError for a dtype that safetensors lacks."""
    for name, tensor in state.items():
        if tensor.dtype is torch.complex128:
            raise UsageError(f"tensor {name!r} is complex128, which .safetensors can't hold; export to .pt")
    aliases = checkpoint.manifest.aliases
    return {name: tensor.clone() if name in aliases else tensor for name, tensor in state.items()}
