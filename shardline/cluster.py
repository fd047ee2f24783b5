"""The cluster: roles, tasks, addresses; cluster.json and TF_CONFIG.

cluster.json has TensorFlow's shape, {"chief": ["host:port"], "ps": [...], "worker": [...], "evaluator": [...]}, like
the "cluster" of a TF_CONFIG. Port 0 means: take a free port and report it to the chief at Join. IPv6 hosts are in
brackets. A role may have a number instead of a list, {"worker": 2}: so many tasks, which report their addresses at
Join. Under "labels", the host of an address may have the name of its machine and of its rack:
{"labels": {"10.0.0.7": {"host": "a", "rack": "r1"}}}.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.errors import ClusterSpecError, nearest
from shardline.host import files
from shardline.roles import ROLES

MAX_PORT = 65_535
MAX_DIGITS = 9
MAX_TASKS = 4096
"""Limit for one role."""
MAX_HOST = 253
"""Maximum length in characters, as in DNS."""
SHOWN = 120
"""Characters of a wrong value that a message repeats."""
NAMED = 16
"""Maximum number of tasks that a message lists."""
FILE_LIMIT_BYTES = 4 << 20
"""Limit for a cluster.json: MAX_TASKS of each role, with names as long as DNS allows."""
ANY_HOST = "*"
"""Host of an address whose task has not named its machine."""
UNNAMED = f"{ANY_HOST}:0"
"""Address of a task that reports it at Join: its machine's own name, and a free port unless --address sets one."""
LABELS, HOST, RACK = "labels", "host", "rack"
ANY = "any"
"""In place of an index: the chief assigns one."""
_HOST = re.compile(r"\*|[\w.-]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[\w.-]+)?")
"""A name, an IPv4 or IPv6 address, or the machine's own name."""
_SCHEMES = ("unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6", "xds", "passthrough")
"""Prefixes that gRPC reads as another kind of address: "unix:1" is a socket in the working folder."""


def _shown(value: object) -> str:
    """A foreign value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text):,} characters)"


def parse_address(text: object, where: str = "the address") -> tuple[str, int]:
    """Host and port of "host:port" or "[::1]:port"; the host without brackets.

    `where` is the subject of the ClusterSpecError's message, such as "cluster.json: ps/0".
    """
    if not isinstance(text, str):
        raise ClusterSpecError(f'{where} is {_shown(text)}; an address is a string "host:port"')
    host, colon, port_text = text.rpartition(":")
    if not colon or not host:
        raise ClusterSpecError(f'{where} is {_shown(text)}; it needs both a host and a port, such as "10.0.0.7:2222"')
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ClusterSpecError(
            f'{where} is {_shown(text)}; give "host:port" without a scheme, and an IPv6 host in brackets: "[::1]:2222"'
        )
    if len(host) > MAX_HOST or not _HOST.fullmatch(host):
        raise ClusterSpecError(f"{where} is {_shown(text)}; {_shown(host)} is not a host name or an IP address")
    if host.lower() in _SCHEMES:
        raise ClusterSpecError(
            f"{where} is {_shown(text)}; gRPC would read the host name {host!r} as a scheme: use its full name or its "
            "IP address"
        )
    if not _is_number(port_text) or int(port_text) > MAX_PORT:
        raise ClusterSpecError(
            f"{where} is {_shown(text)}; the port {_shown(port_text)} must be a number from 0 (any free one) to "
            f"{MAX_PORT}"
        )
    return host, int(port_text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def format_address(host: str, port: int) -> str:
    """Text "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_task(text: str) -> tuple[str, int]:
    """Role and index of a task's name, such as "ps/0". Raises ClusterSpecError."""
    role, slash, index = text.partition("/")
    if index == ANY and role in ROLES:
        raise ClusterSpecError(f"{text!r} asks the chief for an index, which only a starting task can do")
    if not slash or role not in ROLES or not _is_number(index):
        hint = "" if role in ROLES else nearest(role, ROLES)
        raise ClusterSpecError(
            f'{_shown(text)} is not a task; use role/index, such as "ps/0", with role {_one_of(ROLES)}{hint}'
        )
    return role, int(index)


@dataclass(frozen=True)
class ClusterSpec:
    """Addresses (host:port) by role, TensorFlow's shape.

    Always has one chief and at least one ps. Raises ClusterSpecError naming what is wrong.
    """

    tasks: Mapping[str, tuple[str, ...]]
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Of the hosts of addresses: HOST and RACK."""

    def __post_init__(self) -> None:
        _check(self.tasks, "the cluster spec")

    @classmethod
    def from_mapping(cls, data: object, source: str = "the cluster spec") -> ClusterSpec:
        """Spec from parsed JSON; `source` names it in errors. By role: lists, or TF's {"0": address} form."""
        if not isinstance(data, Mapping):
            raise ClusterSpecError(
                f'{source} is a JSON {_kind(data)}; it must be an object: {{"chief": ["host:port"], "ps": [...]}}'
            )
        tasks = {role: _addresses(role, entries, source) for role, entries in data.items() if role != LABELS}
        _check(tasks, source)
        hosts = {parse_address(one)[0] for addresses in tasks.values() for one in addresses}
        return cls({role: tasks[role] for role in ROLES if role in tasks}, _labels(data.get(LABELS, {}), hosts, source))

    @classmethod
    def from_json(cls, text: str, source: str = "the cluster spec") -> ClusterSpec:
        """Spec from a JSON text. Raises ClusterSpecError."""
        return cls.from_mapping(_parse_json(text, source), source)

    @classmethod
    def read(cls, path: Path) -> ClusterSpec:
        """Spec from a cluster.json. Raises ClusterSpecError."""
        try:
            text = files.read_text(path, FILE_LIMIT_BYTES)
        except FileNotFoundError:
            raise ClusterSpecError(f"cluster file {path} does not exist") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ClusterSpecError(f"cluster file {path} can't be read: {reason}") from None
        return cls.from_json(text, str(path))

    def to_json(self) -> str:
        labels = {LABELS: self.labels} if self.labels else {}
        return json.dumps({**{role: list(own) for role, own in self.tasks.items()}, **labels}, indent=2) + "\n"

    def addresses(self, role: str) -> tuple[str, ...]:
        """Addresses of a role by index; empty if the cluster has none."""
        return self.tasks.get(role, ())

    def num(self, role: str) -> int:
        return len(self.addresses(role))

    def task_names(self, role: str | None = None) -> tuple[str, ...]:
        """Names such as "ps/0", of one role or of all in the order of ROLES."""
        roles = tuple(ROLES) if role is None else (role,)
        return tuple(f"{name}/{index}" for name in roles for index in range(self.num(name)))

    def address(self, task: str) -> str:
        """Address of a task. Raises ClusterSpecError listing the existing tasks."""
        role, index = parse_task(task)
        if index >= self.num(role):
            raise ClusterSpecError(
                f"task {task} is not in the cluster spec; it has {_named(self.task_names()) or 'no tasks'}"
            )
        return self.tasks[role][index]

    def machine(self, address: str) -> str:
        """Name of the machine of an address: its label, or the host, in small letters."""
        host = parse_address(address)[0]
        return self.labels.get(host, {}).get(HOST, host).lower()

    def machines(self, role: str) -> list[str]:
        """The machine of each task of a role; ANY_HOST of one that has not named it."""
        return [self.machine(address) for address in self.addresses(role)]

    @property
    def racks(self) -> dict[str, str]:
        """The rack of each task on a host with this label."""
        hosts = {task: parse_address(self.address(task))[0] for task in self.task_names()}
        return {task: rack for task, host in hosts.items() if (rack := self.labels.get(host, {}).get(RACK))}

    @property
    def chief(self) -> str:
        return self.tasks["chief"][0]

    def neighbours(self, task: str) -> int:
        """Number of tasks before this one that may be on its machine and want a device of their own.

        A ps counts servers; others count workers, then the chief, evaluators and tasks of other roles. A task that has
        not named its machine may be on any.
        """
        role, index = parse_task(task)
        mates = ROLES.having(lambda other: other.holds is ROLES[role].holds)
        hosts = [
            (f"{name}/{number}", machine)
            for name in sorted(mates, key=lambda name: name != "worker")
            for number, machine in enumerate(self.machines(name))
        ]
        mine = dict(hosts).get(f"{role}/{index}", ANY_HOST)
        before = itertools.takewhile(lambda item: item[0] != f"{role}/{index}", hosts)
        return sum(mine == ANY_HOST or host in (mine, ANY_HOST) for _, host in before)

    def with_address(self, task: str, address: str) -> ClusterSpec:
        """The same cluster with a task's address set, or with one more task at the end of its role."""
        role, index = parse_task(task)
        addresses = list(self.addresses(role))
        if index == len(addresses):
            addresses.append(address)
        else:
            self.address(task)
            addresses[index] = address
        return self._with_role(role, addresses)

    def with_place(self, task: str, address: str) -> ClusterSpec:
        """The same cluster with the address of a task that got its index from the chief, maybe beyond the spec.

        Tasks in between are UNNAMED: they exist, but this one need not know them.
        """
        role, index = parse_task(task)
        addresses = list(self.addresses(role))
        addresses += [UNNAMED] * (index + 1 - len(addresses))
        addresses[index] = address
        return self._with_role(role, addresses)

    def _with_role(self, role: str, addresses: list[str]) -> ClusterSpec:
        tasks = {**self.tasks, role: tuple(addresses)}
        return ClusterSpec({name: tasks[name] for name in ROLES if name in tasks}, self.labels)


@dataclass(frozen=True)
class TaskPlace:
    spec: ClusterSpec
    role: str
    index: int

    @property
    def task(self) -> str:
        """Name, such as "worker/3"."""
        return f"{self.role}/{self.index}"


def own_address(address: str, hostname: str = "") -> str:
    """The address with this machine's own name if it has no host, as in ":2222" and "*:2222".

    hostname: that name, by default the system's. Raises ClusterSpecError.
    """
    if address.startswith(":"):
        address = f"*{address}"
    host, port = parse_address(address, "--address")
    return format_address(hostname or socket.gethostname(), port) if host == "*" else address


def wants_place(task: str | None) -> str | None:
    """Role for a task such as "worker/any", which asks the chief for its index; None for other tasks."""
    role, _, index = (task or "").partition("/")
    return role if index == ANY and role in ROLES else None


def check_chief_port(place: TaskPlace, *, ready_fd: int | None = None) -> None:
    """Raise ClusterSpecError if others can't find the chief. ready_fd: on which it reports its address, if at all."""
    chief = place.spec.chief
    if parse_address(chief)[1] == 0 and (place.role != "chief" or ready_fd is None):
        raise ClusterSpecError(
            f"chief/0 is {chief} in the cluster spec; it needs a fixed port so that other tasks can find it"
        )


def from_tf_config(text: str, *, host: str = "127.0.0.1") -> TaskPlace:
    """Cluster and own task from a TF_CONFIG as TensorFlow writes it.

    "master" is read as "chief". An evaluator may be missing in the cluster, as in TensorFlow: it then gets index 0 and
    listens on a free port of `host`. Raises ClusterSpecError; a chief is required, since it admits the tasks and writes
    the checkpoints.
    """
    data = _parse_json(text, "TF_CONFIG")
    if not isinstance(data, Mapping):
        raise ClusterSpecError(f'TF_CONFIG is a JSON {_kind(data)}; it must be {{"cluster": ..., "task": ...}}')
    for key in ("cluster", "task"):
        if not isinstance(data.get(key), Mapping):
            raise ClusterSpecError(f'TF_CONFIG has no object "{key}"; it must be {{"cluster": ..., "task": ...}}')
    cluster = dict(data["cluster"])
    if "master" in cluster:
        if "chief" in cluster:
            raise ClusterSpecError('TF_CONFIG has both a "master" and a "chief"; they are the same role: keep "chief"')
        cluster["chief"] = cluster.pop("master")
    spec = ClusterSpec.from_mapping(cluster, 'TF_CONFIG["cluster"]')
    role, index = _tf_task(data["task"])
    if role == "evaluator" and spec.num("evaluator") == 0:
        return TaskPlace(spec.with_address("evaluator/0", format_address(host, 0)), "evaluator", 0)
    spec.address(f"{role}/{index}")
    return TaskPlace(spec, role, index)


def locate(
    role: str | None,
    *,
    cluster: str | None,
    task: str | None,
    tf_config: str | None,
    host: str = "127.0.0.1",
) -> TaskPlace:
    """A task's membership, from its flags and environment. Raises ClusterSpecError.

    role: the role of this process, or None for the task's. cluster: path of a cluster.json, or its JSON text; takes
    precedence over tf_config. task: "ps/0"; default: TF_CONFIG's, or index 0 if the role has just one task.
    """
    if cluster is None and tf_config is None:
        raise ClusterSpecError("no cluster given; use --cluster FILE, SHARDLINE_CLUSTER or TF_CONFIG")
    named = parse_task(task) if task is not None else None
    if cluster is None:
        assert tf_config is not None
        place = from_tf_config(tf_config, host=host)
        if named is not None:
            place = TaskPlace(place.spec, *named)
    else:
        spec = read_spec(cluster)
        if named is None and tf_config is not None:
            named = _tf_task(dict(_parse_json(tf_config, "TF_CONFIG")).get("task"))
        place = TaskPlace(spec, *(named or _only_task(spec, role)))
    if role is not None and place.role != role:
        raise ClusterSpecError(
            f"task {place.task} does not have the role {role}; start it with: shardline {place.role}"
        )
    place.spec.address(place.task)
    return place


def read_spec(cluster: str) -> ClusterSpec:
    """Spec from the path of a cluster.json, or from a JSON text (starting with a brace)."""
    if cluster.lstrip().startswith("{"):
        return ClusterSpec.from_json(cluster, "SHARDLINE_CLUSTER")
    return ClusterSpec.read(Path(cluster))


def chief_address(cluster: str | None) -> str:
    """Address of the chief in a cluster.json (path or text), or in TF_CONFIG. Raises ClusterSpecError."""
    if cluster:
        return read_spec(cluster).chief
    if tf_config := os.environ.get("TF_CONFIG"):
        return from_tf_config(tf_config).spec.chief
    raise ClusterSpecError("no cluster given; use --cluster FILE, SHARDLINE_CLUSTER or TF_CONFIG")


def _only_task(spec: ClusterSpec, role: str | None) -> tuple[str, int]:
    if role is None:
        raise ClusterSpecError("no task given; set SHARDLINE_TASK or TF_CONFIG, for example SHARDLINE_TASK=worker/0")
    if spec.num(role) > 1:
        raise ClusterSpecError(f"no task given; use --task with one of {_named(spec.task_names(role))}")
    return role, 0


def _tf_task(task: object) -> tuple[str, int]:
    if not isinstance(task, Mapping):
        raise ClusterSpecError('TF_CONFIG["task"] must be an object such as {"type": "worker", "index": 0}')
    role = "chief" if task.get("type") == "master" else task.get("type")
    if not isinstance(role, str) or role not in ROLES:
        raise ClusterSpecError(f'TF_CONFIG["task"]["type"] is {_shown(role)}; it must be {_one_of(ROLES)}')
    # TensorFlow's tools write the index as a number or as text, and omit it for roles with a single task.
    index = task.get("index", 0 if role in ("chief", "evaluator") else None)
    if isinstance(index, str) and _is_number(index):
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ClusterSpecError(f'TF_CONFIG["task"]["index"] is {_shown(index)}; it must be a number from 0')
    return role, index


def _addresses(role: object, entries: object, source: str) -> tuple[str, ...]:
    if role not in ROLES:
        raise ClusterSpecError(
            f"{source} has a role {_shown(role)}; the roles are {_one_of(ROLES)}{nearest(str(role), ROLES)}"
        )
    if isinstance(entries, int) and not isinstance(entries, bool):
        if not 1 <= entries <= MAX_TASKS:
            raise ClusterSpecError(
                f'{source}: "{role}" is {_shown(entries)}; a number of tasks must be 1 to {MAX_TASKS}'
            )
        return (UNNAMED,) * entries
    if isinstance(entries, Mapping | list | tuple) and len(entries) > MAX_TASKS:
        raise ClusterSpecError(f'{source}: "{role}" has {len(entries):,} tasks; a role has {MAX_TASKS:,} at most')
    if isinstance(entries, Mapping):
        try:
            entries = [entries[str(index)] for index in range(len(entries))]
        except KeyError as missing:
            raise ClusterSpecError(
                f'{source}: "{role}" has {len(entries)} numbered tasks, but no {missing}; number them from "0"'
            ) from None
    if not isinstance(entries, list | tuple):
        raise ClusterSpecError(f'{source}: "{role}" is a JSON {_kind(entries)}; it must be a list of "host:port"')
    return tuple(entries)


def _labels(labels: object, hosts: Iterable[str], source: str) -> dict[str, dict[str, str]]:
    """The labels of hosts. Raises ClusterSpecError if they are not such, or contradict addresses or each other."""
    where = f'{source}: "{LABELS}"'
    if not isinstance(labels, Mapping):
        raise ClusterSpecError(f'{where} is a JSON {_kind(labels)}; it must be {{"HOST": {{"{RACK}": "NAME"}}}}')
    racks: dict[str, tuple[str, str]] = {}
    for host, own in labels.items():
        if host not in hosts:
            raise ClusterSpecError(f"{where} has {_shown(host)}, and no task's address has this host")
        if not isinstance(own, Mapping) or not own.keys() <= {HOST, RACK} or not all(map(_is_name, own.values())):
            raise ClusterSpecError(f'{where} of {host} is {_shown(own)}; give names as "{HOST}", "{RACK}" or both')
        machine, rack = own.get(HOST, host).lower(), own.get(RACK, "")
        other, known = racks.setdefault(machine, (host, rack))
        if rack != known:
            raise ClusterSpecError(
                f"{where}: {other} is in rack {known!r} and {host} in rack {rack!r}, and both are the machine {machine}"
            )
    return {host: dict(own) for host, own in labels.items()}


def _is_name(label: object) -> bool:
    return isinstance(label, str) and re.fullmatch(r"[\w.-]{1,64}", label) is not None


def _check(tasks: Mapping[str, tuple[str, ...]], source: str) -> None:
    for role, addresses in tasks.items():
        if role not in ROLES:
            raise ClusterSpecError(
                f"{source} has a role {_shown(role)}; the roles are {_one_of(ROLES)}{nearest(str(role), ROLES)}"
            )
        if not addresses:
            raise ClusterSpecError(f'{source}: "{role}" is an empty list; give its addresses or leave the role out')
    if "ps" not in tasks:
        raise ClusterSpecError(f'{source} has no "ps"; at least one parameter server is needed')
    if "chief" not in tasks:
        raise ClusterSpecError(
            f'{source} has no "chief"; one is needed, to admit the other tasks and write checkpoints'
        )
    if len(tasks["chief"]) > 1:
        raise ClusterSpecError(f'{source} has {len(tasks["chief"])} addresses for "chief"; a cluster has one chief')
    owners: dict[tuple[str, int], str] = {}
    for role, addresses in tasks.items():
        for index, address in enumerate(addresses):
            task = f"{role}/{index}"
            host, port = parse_address(address, f"{source}: {task}")
            other = owners.setdefault((host.lower(), port), task)
            if other != task and port != 0:
                raise ClusterSpecError(f"{source}: {other} and {task} have the same address {address}")


def _parse_json(text: str, source: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name in _repeated(name for name, _ in pairs):
            raise ClusterSpecError(f"{source} has {_shown(name)} twice in one object; remove one of them")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ClusterSpecError(
            f"{source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:
        # A number with thousands of digits, or endlessly nested objects.
        raise ClusterSpecError(f"{source} can't be read: {error}") from None


def _named(tasks: tuple[str, ...]) -> str:
    more = f" and {len(tasks) - NAMED:,} more" if len(tasks) > NAMED else ""
    return ", ".join(tasks[:NAMED]) + more


def _repeated(names: Iterator[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)


def _one_of(roles: Iterable[str]) -> str:
    words = tuple(roles)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return names.get(type(value), type(value).__name__)
