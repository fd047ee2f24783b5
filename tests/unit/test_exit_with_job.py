"""--exit-with-job: what a parameter server ends with, whichever comes first, the command to stop or the orders."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shardline.core.orders import Orders, Phase
from shardline.core.timeouts import Timeouts
from shardline.rpc.joining import Applicant
from shardline.rpc.link import ChiefLink
from shardline_ps.service import exit_code_of


@pytest.fixture
def link() -> Iterator[ChiefLink]:
    made = ChiefLink("127.0.0.1:1", Timeouts(total_s=2.0), Applicant(role="ps", index=0))
    yield made
    made.close()


@pytest.mark.parametrize("code", [0, 4])
def test_server_ends_as_the_job_did_where_the_orders_came_first(link: ChiefLink, code: int) -> None:
    link.obey(Orders(version=1, phase=Phase.ENDED, exit_code=code))
    assert exit_code_of(link) == code


def test_server_that_is_stopped_first_waits_for_how_the_job_went(link: ChiefLink) -> None:
    late = threading.Timer(0.05, link.obey, [Orders(version=1, phase=Phase.ENDED, exit_code=4)])
    late.start()
    assert exit_code_of(link) == 4
    late.join()


def test_server_that_is_never_told_how_the_job_went_takes_it_for_failed(link: ChiefLink) -> None:
    link.obey(Orders(version=1, phase=Phase.RUNNING))
    assert exit_code_of(link) == 3
