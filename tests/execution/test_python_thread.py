"""What is particular to calls in threads of the host."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import pytest

from stellwerk.core.run import Failed, Succeeded
from tests.execution.python_rig import Rig, thread_rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with thread_rig(threads=1) as rig:
        yield rig


async def test_a_thread_whose_call_was_over_its_time_serves_the_next_one(rig: Rig) -> None:
    for _ in range(20):
        late = rig.begin("wait_for_ever", timeout_ms=1)
        next_one = rig.begin("add", [1, 2])
        end = await rig.end_of(late)
        assert isinstance(end, Failed)
        assert end.reason == "timeout"
        assert isinstance(await rig.end_of(next_one), Succeeded)


async def test_a_stop_that_comes_as_the_call_ends_never_hits_the_next_one(rig: Rig) -> None:
    for _ in range(300):
        first, second = rig.begin("nothing"), rig.begin("add", [1, 2])
        rig.executor.stop(first, 1, 0)
        assert await rig.end_of(second) == Succeeded(result=b"3")
        assert isinstance(await rig.end_of(first), Succeeded | Failed)


async def test_what_others_print_goes_where_it_went_before(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = rig.begin("print_only", ["inside"])
    print("outside")
    await rig.end_of(run_id)
    assert capsys.readouterr().out == "outside\n"
    assert "inside 0" in rig.output.of(run_id)


async def test_closing_puts_the_hosts_own_streams_back() -> None:
    before = sys.stdout, sys.stderr
    async with thread_rig() as rig:
        await rig.call("nothing")
        assert (sys.stdout, sys.stderr) != before
    assert (sys.stdout, sys.stderr) == before


async def test_only_allowed_packages_are_called() -> None:
    async with thread_rig(allowed_packages=[]) as rig:
        refused = await rig.call("nothing")
        assert isinstance(refused, Failed)
        assert "(none)" in refused.error
