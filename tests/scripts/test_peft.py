"""Adapters of peft (LoRA) on a frozen model, trained by a Hugging Face Trainer: alone, merged, unmerged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.client.api.session import Session
from shardline.errors import JobError
from tests.scripts.test_transformers import EVERY, assert_equal, make_model, trainer
from tests.support.services import SEEDING, Services

peft = pytest.importorskip("peft", reason="peft is not installed; make test-scripts does it")
transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-scripts does it"
)
Callback: Any = transformers.TrainerCallback


def adapted() -> torch.nn.Module:
    model = make_model()
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    with SEEDING:
        torch.manual_seed(4)
        found: torch.nn.Module = peft.get_peft_model(model, config)
    return found


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)


def attached(services: Services) -> tuple[Session, torch.nn.Module, torch.optim.Optimizer]:
    session, model = services.connect(), adapted()
    return session, model, session.attach(model, make_optimizer(model))


def test_adapters_train_alone_and_are_merged_afterwards_as_without_shardline(
    start: Callable[..., Services], tmp_path: Path
) -> None:
    plain = adapted()
    trainer(plain, make_optimizer(plain), tmp_path / "plain", steps=EVERY).train()
    services = start(ps=2, workers=1)
    session, model, optimizer = attached(services)
    trainer(model, optimizer, tmp_path / "ours", steps=EVERY).train()
    session.close()
    assert services.end()["steps"] == EVERY
    assert_equal(model, plain)
    merged, expected = (one.merge_and_unload() for one in (model, plain))
    assert_equal(merged, expected)
    first = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(merged.state_dict()[first], make_model().state_dict()[first])


class Merging(Callback):  # type: ignore[misc]
    """Merges the adapters into the model between the second backward pass and its step."""

    def __init__(self, model: Any, *, back: bool) -> None:
        self._model = model
        self._back = back

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self._model.merge_adapter()
            if self._back:
                # It subtracts what it has added, which leaves other bits.
                self._model.unmerge_adapter()


@pytest.mark.parametrize("back", [False, True], ids=["merged", "unmerged"])
def test_adapters_that_are_merged_while_they_train_are_refused_by_the_weights_name(
    start: Callable[..., Services], tmp_path: Path, back: bool
) -> None:
    services = start(ps=1, workers=1)
    session, model, optimizer = attached(services)
    work = trainer(model, optimizer, tmp_path / "ours", steps=EVERY)
    work.add_callback(Merging(model, back=back))
    with pytest.raises(JobError, match=r"step 1: '.*c_attn\.base_layer\.weight' was written to") as found:
        work.train()
    session.fail(found.value)
    session.shutdown()
    services.end(code=2)
