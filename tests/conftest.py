"""What holds for every test."""

from __future__ import annotations

import torch

# As in the roles' processes. pytest runs in as many processes as there are cores; more threads would only wait there.
torch.set_num_threads(1)
