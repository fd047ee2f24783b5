"""shardline.Ensemble: the averages, a state_dict there and back, and what can't be averaged."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import shardline
from shardline import Ensemble
from shardline.errors import JobError


class Net(nn.Module):
    """A classifier of 4 classes with a buffer that training changes."""

    def __init__(self, width: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, points: Tensor, scale: float = 1.0) -> Tensor:
        return self.layers(points * scale)  # type: ignore[no-any-return]


def nets(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(1)
    return [Net(width) for width in range(6, 6 + count)]


POINTS = torch.randn(20, 3, generator=torch.Generator().manual_seed(2)) * 3
LABELS = torch.arange(20) % 4


@torch.no_grad()
def test_the_average_is_that_of_outputs_or_of_probabilities() -> None:
    members = nets()
    outputs = torch.stack([one.eval()(POINTS, scale=2.0) for one in members])
    assert torch.equal(Ensemble(members)(POINTS, scale=2.0), outputs.mean(0))
    found = Ensemble(members, "probabilities")(POINTS, scale=2.0)
    torch.testing.assert_close(found, outputs.softmax(-1).mean(0).log())
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(20))
    torch.testing.assert_close(functional.log_softmax(found, -1), found)
    losses = [functional.cross_entropy(one, LABELS) for one in outputs]
    for average in ("outputs", "probabilities"):
        loss = functional.cross_entropy(Ensemble(members, average)(POINTS, scale=2.0), LABELS)
        assert loss < sum(losses) / len(losses), "by the convexity of the loss, for any members"


@torch.no_grad()
def test_the_classes_may_be_in_another_dimension() -> None:
    members = [nn.Conv2d(2, 3, 1) for _ in range(2)]
    image = torch.randn(1, 2, 4, 5)
    found = Ensemble(members, "probabilities", dim=1)(image)
    torch.testing.assert_close(found, torch.stack([one(image).softmax(1) for one in members]).mean(0).log())
    with pytest.raises(JobError, match=r"outputs of shape \[1, 3, 4, 5\] have their classes in any dimension; say"):
        Ensemble(members, "probabilities")(image)


def test_it_is_an_ordinary_module(tmp_path: Path) -> None:
    torch.manual_seed(3)
    ensemble = Ensemble(Net() for _ in range(3))
    functional.cross_entropy(ensemble(POINTS), LABELS).backward()
    assert all(parameter.grad is not None for parameter in ensemble.parameters())
    names = {f"members.{number}.{name}" for number in range(3) for name in Net().state_dict()}
    assert ensemble.state_dict().keys() == names
    save_file(ensemble.state_dict(), tmp_path / "ensemble.safetensors")
    again = Ensemble([Net() for _ in range(3)])
    again.load_state_dict(load_file(tmp_path / "ensemble.safetensors"))
    assert torch.equal(again.eval()(POINTS), ensemble.eval()(POINTS))
    assert torch.equal(copy.deepcopy(ensemble)(POINTS), ensemble(POINTS))


@pytest.mark.parametrize("average", ["outputs", "probabilities"])
def test_torch_exports_it_as_one_program(average: str) -> None:
    ensemble = Ensemble(nets(), average).eval()
    shapes = {"args": ({0: torch.export.Dim("batch", min=2)},)}
    program = torch.export.export(ensemble, (POINTS,), dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(POINTS[:7]), ensemble(POINTS[:7]))


def test_what_can_not_be_averaged_is_refused() -> None:
    one = Net()
    for members, sentence in (
        ([], "0 members are 0 different modules; give two or more"),
        ([one], "1 members are 1 different modules"),
        ([one] * 5, r"5 members are 1 different modules; .* each an object of its own: \[Net\(\) for _ in"),
    ):
        with pytest.raises(JobError, match=sentence):
            Ensemble(members)
    with pytest.raises(JobError, match=r"average is 'output'; it must be outputs or .*; did you mean 'outputs'"):
        Ensemble(nets(), "output")
    with pytest.raises(JobError, match=r"return torch.float32 \[20, 4\], torch.float32 \[20, 5\]; it averages tensors"):
        Ensemble([Net(), Net(), Net(classes=5)])(POINTS)

    class Named(nn.Module):
        def forward(self, points: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=points)

    with pytest.raises(JobError, match="the members return SimpleNamespace; it averages tensors"):
        Ensemble([Named(), Named()])(POINTS)
    with pytest.raises(JobError, match=r"outputs of shape \[20, 1\] have no two classes in dimension -1"):
        Ensemble([Net(classes=1), Net(classes=1)], "probabilities")(POINTS)
    with pytest.raises(JobError, match="a member is function; give modules"):
        Ensemble([one, functional.relu])
    assert "Ensemble" in dir(shardline)
