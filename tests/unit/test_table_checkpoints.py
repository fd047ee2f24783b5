"""Embedding tables in checkpoints: exact on any number of servers, refused by another table, exported and looked up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardline.checkpoint import Checkpoint, CheckpointStore, export
from shardline.checkpoint.content import ContentDigest, shard_entries, slice_rows
from shardline.cli.main import main
from shardline.core.image import VALUE, BucketImage
from shardline.core.plan import Plan, make_plan
from shardline.core.rows import PARTS, part_of
from shardline.core.spec import JobSpec, TensorKind, TensorSpec
from shardline.core.tensor_bytes import params_sha256
from shardline.errors import CheckpointError
from shardline.storage.population import filter_width
from shardline.storage.table import FILTER, IDS, check_image, row_widths
from shardline.update.rows import ROW_INITS
from shardline_chief.io.checkpointer import parameters_digest
from tests.support.checkpoints import assert_same_images, cut_of, edit_header, images_of, job_of, spec


def table(name: str, dim: int = 3, rule: str = "adagrad", init: str = "uniform", **bounds: Any) -> TensorSpec:
    return spec(name, (PARTS, dim), kind=TensorKind.TABLE, rule=rule, init=init, **bounds)


USERS, ITEMS, EMPTY = table("users", rule="adam"), table("items", 5, "rowwise-adagrad", "normal:seed=3"), table("none")
BOUNDED = table("bounded", 2, "sgd", admit="after:count=3,ids=100", evict="age:steps=9", max_rows=5000)
TENSORS = (spec("w", (400, 60)), USERS, ITEMS, EMPTY, BOUNDED)
EXTREMES = torch.tensor([-(1 << 63), -1, 0, (1 << 63) - 1])


def rows_of(tensor: TensorSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """All that a table has, by name: ids in the order of files, and rows of its values and states."""
    generator = torch.Generator().manual_seed(seed + tensor.row_elements)
    ids = torch.cat([EXTREMES, torch.randint(1, 1 << 40, (700,), generator=generator).unique()])
    ids = torch.empty(0, dtype=torch.int64) if tensor is EMPTY else ids.sort().values
    ids = ids[torch.argsort(part_of(ids), stable=True)]
    found = {name: torch.randn(len(ids), width, generator=generator) for name, width in row_widths(tensor).items()}
    if width := filter_width(tensor):
        found[FILTER] = torch.randint(0, 3, (PARTS, width), dtype=torch.uint8, generator=generator)
    return {IDS: ids, **found}


def table_images(plan: Plan, step: int, seed: int = 0) -> dict[int, list[BucketImage]]:
    """As images_of(), which knows no tables."""
    found = images_of(plan, step, seed)
    for shard, images in found.items():
        for number, bucket in enumerate(plan.shards[shard].buckets):
            if bucket.kind is TensorKind.TABLE:
                (piece,) = bucket.slices
                held = rows_of(plan.tensors[piece.tensor], seed)
                part = part_of(held[IDS]) - piece.first_row
                mine = (part >= 0) & (part < piece.rows)
                tensors = {name: value[mine].reshape(-1) for name, value in held.items() if name != FILTER}
                if FILTER in held:
                    tensors[FILTER] = held[FILTER][piece.first_row :][: piece.rows].reshape(-1)
                images[number] = BucketImage(shard=shard, bucket=number, step=step, version=step, tensors=tensors)
    return found


def digest(job: JobSpec, plan: Plan, seed: int = 0) -> str:
    out = ContentDigest(job.tensors)
    for shard, images in table_images(plan, 1, seed).items():
        out.add(shard_entries(images, plan, shard, job.rule), slice_rows(plan, shard))
    return out.hexdigest()


def saved(folder: Path, shards: int = 2) -> Checkpoint:
    job = job_of(TENSORS)
    plan = make_plan(TENSORS, shards)
    store = CheckpointStore(folder, keep=2)
    store.commit(cut_of(job, step=1, plan=plan, images=table_images(plan, 1)))
    return store.open(1)


def test_rows_are_restored_onto_any_number_of_servers(tmp_path: Path) -> None:
    job = job_of(TENSORS)
    found = set()
    for shards in (1, 2, 3, 5):
        checkpoint = saved(tmp_path / str(shards), shards)
        found |= {
            (checkpoint.manifest.content_sha256, parameters_digest(checkpoint)),
            (digest(job, checkpoint.plan), ""),
        }
        for other in (1, 2, 3, 5):
            plan = make_plan(TENSORS, other, shares=[2 / (other + 1), *[1 / (other + 1)] * (other - 1)])
            for shard, expected in table_images(plan, 1).items():
                assert_same_images(list(checkpoint.images(plan, shard)), expected)
    assert len(found) == 2
    assert digest(job, make_plan(TENSORS, 1), seed=1) not in {content for content, _ in found}


@pytest.mark.parametrize("tensor", [USERS, BOUNDED], ids=["users", "bounded"])
def test_digest_notices_a_bit_of_an_id_a_row_and_a_state(tensor: TensorSpec) -> None:
    job, plan = job_of((tensor,)), make_plan((tensor,), 1)
    (image,) = table_images(plan, 1)[0]

    def changed(name: str) -> str:
        value = image.tensors[name].clone()
        # Another id of the same part in the same place.
        value[-1] = twin if name == IDS else -1 - value[-1]
        out = ContentDigest(job.tensors)
        one = dataclasses.replace(image, tensors={**image.tensors, name: value})
        out.add(shard_entries([one], plan, 0, job.rule), slice_rows(plan, 0))
        return out.hexdigest()

    last = image.tensors[IDS][-1]
    later = last + 1 + torch.arange(20 * PARTS)
    twin = later[part_of(later) == part_of(last[None])][0]
    digests = {digest(job, plan), *(changed(name) for name in image.tensors)}
    assert len(digests) == 1 + len(image.tensors)


def test_rows_are_read_by_id_and_those_not_stored_are_as_made_at_first(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 3)
    held = rows_of(ITEMS)
    asked = torch.cat([held[IDS][::7], torch.tensor([5, -7]), EXTREMES])
    found, stored = checkpoint.table("items").find(asked)
    at = {number: row for row, number in enumerate(held[IDS].tolist())}
    fresh = ROW_INITS.parse(ITEMS.init).rows("items", asked, 5)
    expected = [held[VALUE][at[i]] if i in at else fresh[n] for n, i in enumerate(asked.tolist())]
    assert torch.equal(found, torch.stack(expected)) and stored.tolist() == [i in at for i in asked.tolist()]
    assert not stored.all() and torch.equal(
        checkpoint.table("items").dense(6), checkpoint.rows("items", torch.arange(6))
    )
    assert checkpoint.table("none").dense(4).shape == (4, 3)
    assert list(checkpoint.state_dict()) == ["w"]
    with pytest.raises(CheckpointError, match=r"no table 'w'; its tables: users, items, none, bounded"):
        checkpoint.rows("w", asked)


def test_another_dim_rule_or_init_is_refused_by_both(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    for other, told in (
        (table("users", 8, "adam"), "table 'users' has dim 8 in the job, 3 in the checkpoint"),
        (table("users", rule="sgd"), "table 'users' has rule sgd in the job, adam in the checkpoint"),
        (
            table("users", rule="adam", init="zeros"),
            "table 'users' has init zeros in the job, uniform in the checkpoint",
        ),
        (spec("users", (PARTS, 3)), "tensor 'users' has kind param in the job, table in the checkpoint"),
    ):
        tensors = (TENSORS[0], other, ITEMS, EMPTY)
        with pytest.raises(CheckpointError, match=told):
            checkpoint.compatible(job_of(tensors))
    tensors = (TENSORS[0], table("users", 8, "sgd"), ITEMS, EMPTY, BOUNDED)
    with pytest.raises(
        CheckpointError, match=r"'users' has rule 'adam' and rows of .*'sgd' and \{'value': 8\} in the plan"
    ):
        list(checkpoint.images(make_plan(tensors, 1), 0))
    other = table("users", rule="adam:lr=0.5")
    assert checkpoint.compatible(job_of((TENSORS[0], other, ITEMS, EMPTY, BOUNDED))) == [
        "tensors[users].rule: adam:lr=0.5 in the job, adam in the checkpoint"
    ]


def test_a_job_may_go_on_with_other_bounds_which_then_begin_anew(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 3)
    free, held = table("bounded", 2, "sgd"), rows_of(BOUNDED)
    bound = {"admit": "after:count=2,ids=70", "evict": "age:steps=3", "max_rows": 2000}
    tensors = (TENSORS[0], table("users", rule="adam", **bound), ITEMS, EMPTY, free)
    notes = checkpoint.compatible(job_of(tensors))
    assert "tensors[users].admit: after:count=2,ids=70 in the job, absent in the checkpoint" in notes
    assert "tensors[bounded].max_rows: 0 in the job, 5000 in the checkpoint" in notes
    plan = make_plan(tensors, 2)
    for shard, spec_of in enumerate(plan.shards):
        for bucket, image in zip(spec_of.buckets, checkpoint.images(plan, shard), strict=True):
            name = plan.tensors[bucket.slices[0].tensor].name
            if bucket.kind is TensorKind.TABLE:
                check_image(image, plan.tensors[bucket.slices[0].tensor], bucket.slices[0])
            if name == "users":
                assert not image.tensors[FILTER].any()
                assert (image.tensors["touched"].view(torch.int32) == checkpoint.step).all()
            if name == "bounded":
                assert image.tensors.keys() == {"value", "ids"}
                mine = torch.isin(held[IDS], image.tensors[IDS])
                assert torch.equal(image.tensors["value"], held[VALUE][mine].view(-1))


def test_an_image_that_does_not_fit_is_not_written() -> None:
    job, plan = job_of((USERS,)), make_plan((USERS,), 2)
    (image,) = table_images(plan, 1)[0]
    for name, value, told in (
        (IDS, image.tensors[IDS].flip(0), "not in the order of parts and ids"),
        (IDS, image.tensors[IDS][[0, *range(len(image.tensors[IDS]) - 1)]], "or one comes twice"),
        (IDS, table_images(plan, 1)[1][0].tensors[IDS], "rows of other parts|numbers of 'value'"),
        ("step", image.tensors["step"][1:], "numbers of 'step' for"),
        ("sum", image.tensors["step"], "the image has exp_avg, .*sum.* rule adam needs exp_avg"),
        ("filter", torch.zeros(1, dtype=torch.uint8), "the image has exp_avg, .*filter.* rule adam needs exp_avg"),
    ):
        with pytest.raises(CheckpointError, match=f"shard 0, table 'users': .*{told}"):
            shard_entries([dataclasses.replace(image, tensors={**image.tensors, name: value})], plan, 0, job.rule)


@pytest.mark.parametrize(
    ("key", "other", "told"),
    [
        ("value/items@0", "value/items@1", r"has not 'value' of all parts of table 'items': those from parts \[0\] on"),
        ("state/ids/items@0", "state/ids/none@7", "has not 'ids' of all parts of table 'items'"),
        (
            "state/sum/items@0",
            "state/z/items@0",
            "has 'z' of table 'items', which rule 'rowwise-adagrad' does not keep",
        ),
        ("state/sum/items@0", "", r"'state/sum/items@0' is I32 .* of dim 5 needs F32 \(\d+, 1\)"),
    ],
)
def test_a_file_that_lacks_a_part_of_a_table_is_refused(tmp_path: Path, key: str, other: str, told: str) -> None:
    checkpoint = saved(tmp_path, 1)

    def change(header: dict[str, Any]) -> None:
        held = header.pop(key)
        header[other or key] = held if other else {**held, "dtype": "I32"}

    edit_header(checkpoint.path, change)
    with pytest.raises(CheckpointError, match=told):
        Checkpoint(checkpoint.path).rows("items", EXTREMES)
    (checkpoint.path / checkpoint.manifest.files[0].name).unlink()
    with pytest.raises(CheckpointError, match=r"shard-00000-of-00001\.safetensors is missing"):
        Checkpoint(checkpoint.path).rows("items", EXTREMES)


def test_export_and_lookup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = saved(tmp_path / "checkpoints")
    export(tmp_path, tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    for tensor in (USERS, ITEMS, EMPTY, BOUNDED):
        held = rows_of(tensor)
        assert torch.equal(exported[f"{tensor.name}.ids"], held[IDS])
        assert torch.equal(exported[f"{tensor.name}.rows"], held[VALUE])
    # As the chief says of the run.
    assert params_sha256(exported) == parameters_digest(checkpoint)
    assert main(["lookup", str(tmp_path), "users", "-1", "5", str(1 << 62)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = checkpoint.rows("users", torch.tensor([-1, 5, 1 << 62]))
    assert [torch.tensor(line["values"]).equal(row) for line, row in zip(lines, rows, strict=True)] == [True] * 3
    assert [(line["id"], line["stored"]) for line in lines] == [(-1, True), (5, False), (1 << 62, False)]
    assert main(["lookup", str(tmp_path), "nobody", "1"]) != 0
    assert "no table 'nobody'; its tables: users, items, none, bounded" in capsys.readouterr().err
