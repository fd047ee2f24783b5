"""shardline export --hf: the folders that from_pretrained() of transformers and of peft reads, with the job's bits."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.checkpoint import find_checkpoint
from shardline.cli.main import main
from tests.e2e.support import train
from tests.support.services import Services

transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-scripts does it"
)
peft: Any = pytest.importorskip("peft", reason="peft is not installed; make test-scripts does it")

# After that: a module that skipped itself is there with nothing in it.
from tests.scripts.test_peft import adapted, attached  # noqa: E402
from tests.scripts.test_transformers import EVERY, assert_equal, make_model, make_optimizer, trainer  # noqa: E402


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_script_with_a_model_of_transformers_is_read_by_from_pretrained(
    start: Callable[..., Services], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    services = start(ps=2, workers=1)
    session, model = services.connect(), make_model()
    optimizer = session.attach(model, make_optimizer(model))
    trainer(model, optimizer, tmp_path / "ours", steps=EVERY).train()
    session.close()
    services.end()
    assert main(["export", str(services.out), str(tmp_path / "hf"), "--hf"]) == 0
    assert names(tmp_path / "hf") == {"config.json", "generation_config.json", "model.safetensors"}
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(found) is type(model)
    assert_equal(found, model)
    assert not torch.equal(found.transformer.wte.weight, make_model().transformer.wte.weight)
    # Tied weights are one tensor there, too.
    assert found.lm_head.weight is found.transformer.wte.weight
    body = transformers.AutoModel.from_pretrained(tmp_path / "hf")
    assert_equal(body, model.transformer)
    capsys.readouterr()
    assert main(["export", str(services.out), str(tmp_path / "hf"), "--hf"]) == 2
    assert capsys.readouterr().err == f"shardline: {tmp_path / 'hf'} is there already; name a folder that is not\n"


def test_of_a_model_with_adapters_the_adapters_alone_are_written(
    start: Callable[..., Services], tmp_path: Path
) -> None:
    services = start(ps=2, workers=1)
    session, model, optimizer = attached(services)
    trainer(model, optimizer, tmp_path / "ours", steps=EVERY).train()
    session.close()
    services.end()
    assert main(["export", str(services.out), str(tmp_path / "hf"), "--hf"]) == 0
    assert names(tmp_path / "hf") - {"README.md"} == {"adapter_config.json", "adapter_model.safetensors"}
    found = peft.PeftModel.from_pretrained(make_model(), tmp_path / "hf")
    assert_equal(found, model)
    first = "base_model.model.transformer.h.0.attn.c_attn.lora_B.default.weight"
    assert found.state_dict()[first].abs().sum() > 0
    assert adapted().state_dict()[first].abs().sum() == 0


JOB = """
import torch, transformers
import shardline

def model():
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=2
    )
    return transformers.BertForSequenceClassification(config)

def dataset():
    rows = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row[0] % 2} for row in rows]

job = shardline.Job(
    model=model,
    loss=lambda model, batch: model(**batch),
    dataset=dataset,
    evaluate=lambda model: {"size": sum(float(one.abs().sum()) for one in model.parameters())},
    best_mode="min",
    optimizer="SGD",
    optimizer_args={"lr": 0.1},
    batch_size=8,
    steps=8,
    checkpoint_every=4,
)
"""


@pytest.mark.timeout(300)
def test_the_best_checkpoint_of_a_job_is_read_by_from_pretrained(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    finished = train(tmp_path / "job.py", tmp_path / "run", "--evaluators", "1")
    assert finished.code == 0, finished
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf"), "--best", "--hf"]) == 0
    best = find_checkpoint(tmp_path / "run", best=True).state_dict()
    found = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").state_dict()
    assert found.keys() == best.keys() - {"bert.embeddings.position_ids"}
    assert all(torch.equal(found[name], best[name]) for name in found)
