"""Before layers are shared, one microbatch tells whether the model can be computed in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline.errors import JobError
from shardline.job import Job
from shardline_pipeline.tensor_parallel import layers_of
from shardline_pipeline.tensor_parallel.trial import try_parts

F = nn.functional
WORDS = torch.arange(24).reshape(6, 4) % 12


class Mlp(nn.Module):
    """between: what is done between the two layers."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.between = between
        self.norm, self.middle = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(self.between(self.up(values)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """heads: of each worker; None = as many as there is room for."""

    def __init__(self, heads: int | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.heads = heads

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        count, words, _ = values.shape

        def split(one: torch.Tensor) -> torch.Tensor:
            return one.reshape(count, words, self.heads or -1, 4).transpose(1, 2)

        found = F.scaled_dot_product_attention(split(self.q(values)), split(self.k(values)), split(self.v(values)))
        return self.out(found.transpose(1, 2).reshape(count, words, -1))  # type: ignore[no-any-return]


class Torch(nn.Module):
    """torch's own attention, which uses the weights of its layers without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.own(values, values, values)[0]  # type: ignore[no-any-return]


class Reads(Mlp):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(values, self.up.weight).relu(), self.down.weight)


class Tied(nn.Module):
    """A head that reads an embedding's weight."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return F.linear(values, self.words.weight)


def net(inner: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(12, 16), inner, nn.Dropout(0.5), nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 4)
    )


def loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def penalized(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return loss(model, batch) + 0.1 * sum(one.square().sum() for one in model.parameters())


def noisy(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return loss(model, batch) * torch.rand(())


def only_training(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    assert model.training
    return loss(model, batch)


def halved(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, batch)


BOTH = {"1.up": "colwise", "1.down": "rowwise"}
HEADS = {"1.q": "colwise", "1.k": "colwise", "1.v": "colwise", "1.out": "rowwise"}


def attempt(inner: nn.Module, shared: dict[str, str], given: Callable[..., torch.Tensor], ranks: int = 2) -> None:
    torch.manual_seed(3)
    model = net(inner)
    job = Job(
        model=lambda: model,
        loss=given,
        dataset=TensorDataset(WORDS, torch.arange(6) % 4),
        optimizer="SGD",
        optimizer_args={"lr": 0.1},
        batch_size=3,
        steps=1,
        tensor_parallel=shared,
        tensor_ranks=ranks,
    )
    before = {name: values.clone() for name, values in model.state_dict().items()}
    state = torch.get_rng_state()
    try:
        try_parts(model, job, layers_of(job, model), ranks)
    finally:
        assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state) and model.training


@pytest.mark.parametrize(
    ("inner", "shared", "given"),
    [
        pytest.param(Mlp(), BOTH, loss, id="columns, then rows"),
        pytest.param(Mlp(F.gelu), {**BOTH, "0": "rowwise", "5": "gathered"}, loss, id="every style"),
        pytest.param(Mlp(), {"0": "gathered", "1.up": "gathered", "1.down": "gathered"}, loss, id="gathered"),
        pytest.param(Attention(), HEADS, loss, id="heads by size"),
        pytest.param(Mlp(F.dropout), BOTH, loss, id="random in evaluation mode too"),
        pytest.param(Mlp(), BOTH, noisy, id="a random loss"),
        pytest.param(Mlp(lambda values: values.softmax(-1)), BOTH, only_training, id="no loss in evaluation mode"),
        pytest.param(Mlp(), BOTH, halved, id="autocast"),
        pytest.param(nn.Linear(16, 16, bias=False), {"1": "gathered"}, loss, id="no bias"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_can_be_computed_in_parts_passes(
    inner: nn.Module, shared: dict[str, str], given: Callable[..., torch.Tensor], ranks: int
) -> None:
    attempt(inner, shared, given, ranks)


DIFFERENT = (
    r"2 workers with a part each would compute something else than the whole 1.down \(Linear, rowwise\): what is"
)
MISUSED = "something uses their weights otherwise than by calling these layers, as a penalty over all parameters does"


@pytest.mark.parametrize(
    ("inner", "shared", "given", "sentence"),
    [
        pytest.param(Mlp(lambda values: values.softmax(-1)), BOTH, loss, DIFFERENT, id="softmax"),
        pytest.param(Mlp(lambda values: F.layer_norm(values, values.shape[-1:])), BOTH, loss, DIFFERENT, id="norm"),
        pytest.param(
            Attention(heads=4), HEADS, loss, "raised RuntimeError: shape .* is invalid.* sizes from", id="heads"
        ),
        pytest.param(
            Mlp(nn.LayerNorm(64)), BOTH, loss, r"normalized_shape=\[64\].*1/2 of 1.up, 1.down as", id="a shape"
        ),
        pytest.param(Mlp(nn.Linear(64, 64)), BOTH, loss, "mat1 and mat2 shapes cannot be multiplied", id="a layer"),
        pytest.param(Reads(), BOTH, loss, MISUSED, id="weights without the layer"),
        pytest.param(
            Torch(), {"1.own.out_proj": "gathered"}, loss, "layers are used by calling these only", id="torch's"
        ),
        pytest.param(Mlp(), BOTH, penalized, MISUSED, id="a penalty"),
    ],
)
def test_what_cant_is_refused_with_what_to_do(
    inner: nn.Module, shared: dict[str, str], given: Callable[..., torch.Tensor], sentence: str
) -> None:
    with pytest.raises(JobError, match=f"(?s){sentence}.* leave .* out of tensor_parallel$"):
        attempt(inner, shared, given)


def test_an_embedding_whose_weight_another_layer_reads_is_not_shared() -> None:
    words = nn.Embedding(12, 16)
    model = nn.Sequential(words, nn.Sequential(Tied(words)))
    job = Job(
        model=lambda: model,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten()),
        dataset=TensorDataset(WORDS),
        optimizer="SGD",
        optimizer_args={"lr": 0.1},
        batch_size=3,
        steps=1,
        tensor_parallel={"0": "gathered"},
    )
    with pytest.raises(JobError, match="weights of shared layers are used by calling these only"):
        try_parts(model, job, layers_of(job, model), 2)
