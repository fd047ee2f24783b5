"""Which lane containers take: shared memory only where it is really shared."""

from __future__ import annotations

import pytest

from tests.containers.stack import Stack


def lanes(stack: Stack) -> set[str]:
    return {line.rpartition(" ")[2] for line in stack.lines("worker") if ": lane " in line and "can't" not in line}


@pytest.mark.long
def test_shared_memory_that_is_asked_for_but_not_shared_is_one_sentence_and_tcp() -> None:
    with Stack("unshared", STEPS="50", LANE="shm") as stack:
        stack.up()
        assert set(stack.exit_codes().values()) == {0}
        assert lanes(stack) == {"tcp"}
        said = [line for line in stack.lines("worker") if "lane shm can't be used" in line]
        # One for each pair of worker and server.
        assert len(said) == 4
        assert all("set the same --run-dir for both" in line and line.endswith("using tcp") for line in said)


def test_containers_with_a_common_folder_of_sockets_share_memory() -> None:
    with Stack("shared", "deploy/compose/shm.yaml", STEPS="50") as stack:
        stack.up()
        assert set(stack.exit_codes().values()) == {0}
        assert lanes(stack) == {"shm"}
        assert not [line for line in stack.lines("worker") if "can't be used" in line]


@pytest.mark.long
@pytest.mark.parametrize("lane", ["grpc"])
def test_lane_of_env_is_taken(lane: str) -> None:
    with Stack("lane", STEPS="50", LANE=lane) as stack:
        stack.up()
        assert set(stack.exit_codes().values()) == {0}
        assert lanes(stack) == {lane}
