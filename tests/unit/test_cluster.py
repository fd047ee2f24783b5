from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from shardline.cluster import (
    UNNAMED,
    ClusterSpec,
    format_address,
    from_tf_config,
    locate,
    own_address,
    parse_address,
    parse_task,
    wants_place,
)
from shardline.errors import ClusterSpecError

SMALL: dict[str, Any] = {"chief": ["h0:1"], "ps": ["h1:1", "h2:1"], "worker": ["h3:1", "h4:1"]}


def tf_config(kind: str, index: object = 0, cluster: dict[str, Any] | None = None) -> str:
    return json.dumps({"cluster": cluster or SMALL, "task": {"type": kind, "index": index}, "environment": "cloud"})


def refusal(text: str) -> str:
    with pytest.raises(ClusterSpecError) as caught:
        ClusterSpec.from_json(text, "cluster.json")
    return str(caught.value)


def test_spec_answers_by_role_task_and_count() -> None:
    spec = ClusterSpec.from_mapping(SMALL)
    assert spec.addresses("ps") == ("h1:1", "h2:1")
    assert spec.address("worker/1") == "h4:1"
    assert spec.chief == "h0:1"
    assert (spec.num("ps"), spec.num("evaluator")) == (2, 0)
    assert spec.task_names() == ("chief/0", "ps/0", "ps/1", "worker/0", "worker/1")
    assert spec.task_names("ps") == ("ps/0", "ps/1")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:0", ("localhost", 0)),
        ("10.0.0.7:2222", ("10.0.0.7", 2222)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_address_parses_and_formats_back(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert format_address(*address) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("localhost", "both a host and a port"),
        (":2222", "both a host and a port"),
        ("h:65536", "the port '65536'"),
        ("h:-1", "the port '-1'"),
        ("h:", "the port ''"),
        ("h:٣", "the port"),
        ("h:" + "1" * 5000, "must be a number from 0"),
        ("h\x00:1", "not a host name"),
        ("\ud800:1", "not a host name"),
        ("::1:2222", "brackets"),
        ("grpc://h:1", "without a scheme"),
        ("[]:1", "not a host name"),
        ("a b:1", "not a host name"),
        (17, 'a string "host:port"'),
    ],
)
def test_bad_address_is_refused_with_its_text_and_place(text: object, says: str) -> None:
    with pytest.raises(ClusterSpecError) as caught:
        parse_address(text, "cluster.json: ps/0")
    assert str(caught.value).startswith(f"cluster.json: ps/0 is {text!r}"[:100])
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["ps", "ps/", "ps/x", "ps/-1", "/0", "server/0", "ps/0/1", "ps/²", "ps/" + "1" * 5000])
def test_bad_task_name_is_refused(text: str) -> None:
    with pytest.raises(ClusterSpecError, match="is not a task"):
        parse_task(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ps": None}, '"ps" is a JSON null'),
        ({"ps": "h:1"}, '"ps" is a JSON string'),
        ({"worker": []}, '"worker" is an empty list'),
        ({"master": ["h:1"]}, "a role 'master'; the roles are chief, ps, worker, aggregator or evaluator"),
        ({"chief": ["a:1", "b:1"]}, "one chief"),
        ({"evaluator": ["H1:1"]}, "ps/0 and evaluator/0 have the same address H1:1"),
        ({"worker": ["h3:1", "h4:x"]}, "worker/1 is 'h4:x'"),
        ({"worker": {"0": "a:1", "2": "b:1"}}, "but no '1'"),
    ],
)
def test_bad_spec_is_refused_with_its_place(change: dict[str, Any], says: str) -> None:
    sentence = refusal(json.dumps(SMALL | change))
    assert sentence.startswith("cluster.json")
    assert says in sentence


@pytest.mark.parametrize("role", ["ps", "chief"])
def test_spec_without_a_needed_role_is_refused(role: str) -> None:
    assert f'has no "{role}"' in refusal(json.dumps({name: SMALL[name] for name in SMALL if name != role}))


def test_spec_that_is_no_json_is_refused_with_line_and_column() -> None:
    assert "at line 2, column 3" in refusal('{\n  ps: ["h:1"]\n}')
    assert "JSON list" in refusal("[]")
    assert "cluster.json can't be read: Exceeds the limit" in refusal('{"worker": ' + "1" * 5000 + "}")
    assert "cluster.json can't be read: maximum recursion" in refusal('{"ps":' * 100_000)
    assert "'ps' twice" in refusal('{"ps": ["h:1"], "chief": ["h:2"], "ps": ["h:3"]}')


@pytest.mark.parametrize(
    "host",
    [
        "a\nb",
        "\x1b]0;x\x07",
        "u@h",
        "%2e%2e",
        "[fe80::1%../../x]",
        "a?b#c",
        "a\\b",
        "<b>",
        "\ud800",
        "\u202eh",
        "h" * 254,
    ],
)
def test_what_is_no_host_is_refused(host: str) -> None:
    sentence = refusal(json.dumps(SMALL | {"worker": [f"{host}:1"]}))
    assert "is not a host name or an IP address" in sentence and sentence.isprintable()


@pytest.mark.parametrize("host", ["unix", "Unix-Abstract", "dns", "vsock", "ipv4"])
def test_a_host_that_grpc_takes_for_a_scheme_is_refused(host: str) -> None:
    # "unix:1" would be a socket named 1 in the working folder, for whoever listens there and whoever calls.
    assert "as a scheme" in refusal(json.dumps(SMALL | {"chief": [f"{host}:1"]}))
    assert parse_address(f"{host}.example:1") == (f"{host}.example", 1)


HUGE = "x" * 1_000_000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"worker": ["h:0"] * 4097}, '"worker" has 4,097 tasks; a role has 4,096 at most'),
        ({"worker": {str(index): "h:0" for index in range(4097)}}, "4,097 tasks"),
        ({"worker": 10**6}, "must be 1 to 4096"),
        ({"worker": 10**4000}, "must be 1 to 4096"),
        ({HUGE: ["h:1"]}, "a role 'xxx"),
        ({HUGE: 10**6}, "a role 'xxx"),
        ({"worker": [HUGE + ":1"]}, "is not a host name"),
        ({"worker": [HUGE]}, "both a host and a port"),
        ({"worker": ["h:" + HUGE]}, "the port 'xxx"),
        ({"worker": [["x"] * 500_000]}, "an address is a string"),
    ],
)
def test_a_huge_spec_is_refused_in_a_short_sentence(change: dict[str, Any], says: str) -> None:
    sentence = refusal(json.dumps(SMALL | change))
    assert says in sentence and len(sentence) < 600


def test_the_sentence_about_a_missing_task_names_a_few_of_many() -> None:
    spec = ClusterSpec.from_mapping(SMALL | {"worker": 4096})
    with pytest.raises(ClusterSpecError, match=r"worker/12 and 4,083 more$"):
        spec.address("ps/2")


def test_missing_or_unreadable_file_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ClusterSpecError, match=r"cluster file .*nothing\.json does not exist"):
        ClusterSpec.read(tmp_path / "nothing.json")
    with pytest.raises(ClusterSpecError, match="can't be read"):
        ClusterSpec.read(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(ClusterSpecError, match="not UTF-8"):
        ClusterSpec.read(tmp_path / "latin")


def test_port_zero_may_be_shared() -> None:
    spec = ClusterSpec.from_mapping({"chief": ["h:0"], "ps": ["h:0", "h:0"]})
    assert spec.num("ps") == 2


def test_task_outside_of_the_spec_is_refused_with_the_tasks_there_are() -> None:
    with pytest.raises(ClusterSpecError, match="ps/2 is not in the cluster spec; it has chief/0, ps/0, ps/1, worker/0"):
        ClusterSpec.from_mapping(SMALL).address("ps/2")


def test_numbered_tasks_are_read_by_their_number() -> None:
    spec = ClusterSpec.from_mapping(SMALL | {"worker": {"1": "b:1", "0": "a:1"}})
    assert spec.addresses("worker") == ("a:1", "b:1")


def test_address_found_at_start_replaces_the_declared_one() -> None:
    spec = ClusterSpec.from_mapping(SMALL).with_address("ps/1", "h2:9").with_address("evaluator/0", "h9:1")
    assert spec.addresses("ps") == ("h1:1", "h2:9")
    assert spec.task_names("evaluator") == ("evaluator/0",)
    with pytest.raises(ClusterSpecError, match="ps/7 is not in"):
        spec.with_address("ps/7", "h:1")


@pytest.mark.parametrize("index", [1, "1"])
def test_tf_config_gives_the_cluster_and_the_task(index: object) -> None:
    place = from_tf_config(tf_config("worker", index))
    assert place.task == "worker/1"
    assert place.spec == ClusterSpec.from_mapping(SMALL)


def test_tf_config_evaluator_may_stand_inside_or_outside_of_the_cluster() -> None:
    outside = from_tf_config(tf_config("evaluator"), host="10.0.0.9")
    assert (outside.task, outside.spec.address("evaluator/0")) == ("evaluator/0", "10.0.0.9:0")
    inside = from_tf_config(tf_config("evaluator", 1, SMALL | {"evaluator": ["e0:1", "e1:1"]}))
    assert inside.spec.address(inside.task) == "e1:1"


def test_tf_config_master_is_the_chief() -> None:
    cluster = {"master": ["m:1"], "ps": ["p:1"]}
    place = from_tf_config(json.dumps({"cluster": cluster, "task": {"type": "master"}}))
    assert (place.task, place.spec.chief) == ("chief/0", "m:1")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "TF_CONFIG is not JSON"),
        ("[]", "JSON list"),
        ('{"task": {}}', 'no object "cluster"'),
        ('{"cluster": {}}', 'no object "task"'),
        (tf_config("worker", cluster={"worker": ["a:1"], "ps": ["b:1"]}), 'has no "chief"'),
        (tf_config("chief", cluster={**SMALL, "master": ["m:1"]}), 'both a "master" and a "chief"'),
        (tf_config("tpu"), "is 'tpu'"),
        (tf_config("worker", -1), "is -1"),
        (tf_config("worker", True), "is True"),
        (tf_config("worker", "1" * 5000), "it must be a number from 0"),
        (tf_config("worker", 2), "worker/2 is not in the cluster spec"),
        (json.dumps({"cluster": SMALL, "task": {"type": "worker"}}), '["index"] is None'),
    ],
)
def test_bad_tf_config_is_refused(text: str, says: str) -> None:
    with pytest.raises(ClusterSpecError) as caught:
        from_tf_config(text)
    assert says in str(caught.value)


def test_flags_win_over_tf_config() -> None:
    other = json.dumps({"chief": ["x:1"], "ps": ["y:1"]})
    place = locate("ps", cluster=other, task="ps/0", tf_config=tf_config("ps", 1))
    assert (place.task, place.spec.chief) == ("ps/0", "x:1")
    place = locate("ps", cluster=None, task="ps/0", tf_config=tf_config("ps", 1))
    assert (place.task, place.spec.chief) == ("ps/0", "h0:1")
    place = locate("ps", cluster=json.dumps(SMALL), task=None, tf_config=tf_config("ps", 1))
    assert place.task == "ps/1"


def test_task_may_be_left_out_where_the_role_has_one() -> None:
    assert locate("chief", cluster=json.dumps(SMALL), task=None, tf_config=None).task == "chief/0"
    with pytest.raises(ClusterSpecError, match="one of ps/0, ps/1"):
        locate("ps", cluster=json.dumps(SMALL), task=None, tf_config=None)
    with pytest.raises(ClusterSpecError, match="SHARDLINE_TASK"):
        locate(None, cluster=json.dumps(SMALL), task=None, tf_config=None)
    with pytest.raises(ClusterSpecError, match="evaluator/0 is not in"):
        locate("evaluator", cluster=json.dumps(SMALL), task=None, tf_config=None)


def test_task_of_another_role_is_refused_with_the_right_command() -> None:
    with pytest.raises(
        ClusterSpecError, match="task worker/0 does not have the role ps; start it with: shardline worker"
    ):
        locate("ps", cluster=json.dumps(SMALL), task="worker/0", tf_config=None)


def test_no_cluster_at_all_names_the_three_ways_to_give_one() -> None:
    with pytest.raises(ClusterSpecError, match="--cluster FILE, SHARDLINE_CLUSTER or TF_CONFIG"):
        locate("ps", cluster=None, task="ps/0", tf_config=None)


hosts = st.one_of(
    st.from_regex(r"[a-z][a-z0-9-]{0,8}(\.[a-z]{1,3})?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
addresses = st.builds(format_address, hosts, st.integers(0, 65_535))


@given(st.lists(addresses, min_size=2, max_size=12, unique_by=str.lower), st.data())
def test_any_valid_spec_survives_json_and_tf_config(pool: list[str], data: st.DataObject) -> None:
    ps = data.draw(st.integers(1, len(pool) - 1))
    workers = data.draw(st.integers(0, len(pool) - 1 - ps))
    parts = {"chief": pool[:1], "ps": pool[1 : 1 + ps], "worker": pool[1 + ps : 1 + ps + workers]}
    parts["evaluator"] = pool[1 + ps + workers :]
    tasks = {role: tuple(part) for role, part in parts.items() if part}
    spec = ClusterSpec(tasks)
    assert ClusterSpec.from_json(spec.to_json()) == spec
    for task in spec.task_names():
        role, index = parse_task(task)
        assert tasks[role][index] == spec.address(task)
        text = json.dumps({"cluster": json.loads(spec.to_json()), "task": {"type": role, "index": index}})
        place = from_tf_config(text)
        assert (place.task, place.spec) == (task, spec)


# Tasks that tell their addresses themselves


def test_number_stands_for_so_many_tasks_without_an_address() -> None:
    spec = ClusterSpec.from_mapping({"chief": ["c:1"], "ps": 2, "worker": 3})
    assert (spec.num("ps"), spec.num("worker"), spec.num("evaluator")) == (2, 3, 0)
    assert spec.address("ps/1") == UNNAMED
    assert ClusterSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("number", [0, -1, 5000])
def test_number_of_tasks_out_of_range_is_named(number: int) -> None:
    said = refusal(json.dumps({"chief": ["c:1"], "ps": number}))
    assert f'"ps" is {number}' in said


def test_switch_is_no_number_of_tasks() -> None:
    assert "must be a list" in refusal('{"chief": ["c:1"], "ps": true}')


def test_place_beyond_the_spec_leaves_those_between_without_an_address() -> None:
    spec = ClusterSpec.from_mapping({"chief": ["c:1"], "ps": 1, "worker": 1}).with_place("worker/3", "w:9")
    assert spec.addresses("worker") == (UNNAMED, UNNAMED, UNNAMED, "w:9")


LABELS = {"h1": {"rack": "r1"}, "h3": {"host": "h1", "rack": "r1"}, "h4": {"rack": "r2"}}


def test_labels_say_which_addresses_are_one_machine_and_which_rack_it_is_in() -> None:
    spec = ClusterSpec.from_mapping({**SMALL, "labels": LABELS})
    assert (spec.machines("ps"), spec.machines("worker")) == (["h1", "h2"], ["h1", "h4"])
    assert spec.racks == {"ps/0": "r1", "worker/0": "r1", "worker/1": "r2"}
    assert ClusterSpec.from_json(spec.to_json()) == spec
    assert spec.with_address("worker/1", "h9:1").labels == LABELS
    assert "labels" not in ClusterSpec.from_mapping(SMALL).to_json()


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ([], '"labels" is a JSON list; it must be'),
        ({"h9": {"rack": "a"}}, "\"labels\" has 'h9', and no task's address has this host"),
        ({"h1": {"row": "a"}}, "\"labels\" of h1 is {'row': 'a'}; give names as"),
        ({"h1": {"rack": 7}}, "\"labels\" of h1 is {'rack': 7}; give names as"),
        (
            {"h1": {"rack": "a"}, "h2": {"host": "H1", "rack": "b"}},
            "h1 is in rack 'a' and h2 in rack 'b', and both are the machine h1",
        ),
    ],
)
def test_labels_that_contradict_addresses_or_each_other_are_refused(labels: object, why: str) -> None:
    said = refusal(json.dumps({**SMALL, "labels": labels}))
    assert said.startswith("cluster.json: ") and why in said


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ({"worker": ["a:1", "b:1", "a:2", "B:2"]}, {"worker/0": 0, "worker/1": 0, "worker/2": 1, "worker/3": 1}),
        # Those that have not named their machine may be on any.
        ({"worker": 3}, {"worker/0": 0, "worker/1": 1, "worker/2": 2}),
        ({"worker": ["*:0", "a:1", "b:1", "*:0"]}, {"worker/1": 1, "worker/2": 1, "worker/3": 3}),
        ({"worker": ["c:2", "c:3"], "evaluator": ["c:4"]}, {"worker/1": 1, "chief/0": 2, "evaluator/0": 3}),
        ({"ps": ["c:5", "p:1", "p:2"], "worker": ["p:3"]}, {"ps/0": 0, "ps/1": 0, "ps/2": 1, "worker/0": 0}),
    ],
)
def test_tasks_of_one_machine_are_numbered(tasks: dict[str, object], expected: dict[str, int]) -> None:
    spec = ClusterSpec.from_mapping({"chief": ["c:1"], "ps": ["p:9"], **tasks})
    assert {task: spec.neighbours(task) for task in expected} == expected


@pytest.mark.parametrize(
    ("address", "own"),
    [(":2222", "here:2222"), (UNNAMED, "here:0"), ("*:7", "here:7"), ("10.0.0.7:2222", "10.0.0.7:2222")],
)
def test_address_without_a_host_is_at_this_machines_name(address: str, own: str) -> None:
    assert own_address(address, "here") == own


def test_index_left_to_the_chief_is_no_index_elsewhere() -> None:
    assert wants_place("worker/any") == "worker"
    assert wants_place("worker/0") is None
    assert wants_place(None) is None
    assert wants_place("cook/any") is None
    with pytest.raises(ClusterSpecError, match="asks the chief for an index"):
        parse_task("worker/any")
