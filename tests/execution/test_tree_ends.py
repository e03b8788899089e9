"""Every shape of tree ends whole, and its neighbours live on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from stellwerk.execute.boot_clock import boot_ms
from stellwerk.execute.keeper_link import KeeperLink
from tests.execution import nasty
from tests.execution.listening import Heard, start, start_ready
from tests.execution.survivors import ROOT, alive, host_environment, nasty_argv, new_token, wait_until

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the complete kill is a promise for Linux"),
]
ROUNDS = 3
GRACE_MS = 50


@pytest.mark.parametrize("shape", [shape.__name__ for shape in nasty.ENDED_FROM_OUTSIDE])
async def test_a_stop_ends_the_whole_tree(link: KeeperLink, shape: str) -> None:
    for _ in range(ROUNDS):
        token = new_token()
        heard = await start_ready(link, nasty_argv(shape, token))
        assert alive(token)
        link.stop(heard.handle, GRACE_MS)
        why, _ = await heard.end()
        assert why == "stop"
        assert alive(token) == set()


@pytest.mark.parametrize("shape", [shape.__name__ for shape in nasty.ENDED_FROM_OUTSIDE])
async def test_a_kill_at_once_ends_the_whole_tree(link: KeeperLink, shape: str) -> None:
    token = new_token()
    heard = await start_ready(link, nasty_argv(shape, token))
    link.stop(heard.handle, 0)
    await heard.end()
    assert alive(token) == set()


@pytest.mark.parametrize("shape", [shape.__name__ for shape in nasty.ENDS_BY_ITSELF])
async def test_what_a_finished_command_leaves_behind_is_ended(link: KeeperLink, shape: str) -> None:
    for _ in range(ROUNDS):
        token = new_token()
        heard = await start_ready(link, nasty_argv(shape, token))
        assert await heard.end() == ("exit", 0)
        assert alive(token) == set()


async def test_bystanders_with_escaped_daemons_keep_all_their_processes(link: KeeperLink) -> None:
    bystanders = {token: await start_ready(link, nasty_argv("cleared", token)) for token in (new_token(), new_token())}
    before = {token: alive(token) for token in bystanders}
    shapes = [shape.__name__ for shape in nasty.ENDED_FROM_OUTSIDE]
    tokens = {shape: new_token() for shape in shapes}
    ending = await asyncio.gather(*(start_ready(link, nasty_argv(shape, tokens[shape])) for shape in shapes))
    for heard in ending:
        link.stop(heard.handle, GRACE_MS)
    await asyncio.gather(*(heard.end() for heard in ending))
    assert {shape: alive(token) for shape, token in tokens.items()} == {shape: set() for shape in shapes}
    assert {token: alive(token) for token in bystanders} == before
    assert all(len(pids) == 2 for pids in before.values())
    await _stop_all(link, list(bystanders.values()))


async def test_a_whole_host_with_its_own_keeper_ends_like_any_command(link: KeeperLink) -> None:
    token = new_token()
    read_end, write_end = os.pipe()
    argv = (sys.executable, str(ROOT / "tests/execution/small_host.py"), "60000")
    heard = start(link, argv, stdout=write_end, env=host_environment(NASTY_TOKEN=token))
    os.close(write_end)
    assert b"keeper" in await asyncio.to_thread(os.read, read_end, 1_000)
    os.close(read_end)
    link.stop(heard.handle, 0)
    await heard.end()
    assert alive(token) == set()


async def test_a_polite_command_is_given_its_grace(link: KeeperLink) -> None:
    heard = await start_ready(link, ("bash", "-c", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done"))
    link.stop(heard.handle, 10_000)
    why, wait_status = await heard.end()
    assert (why, wait_status >> 8) == ("stop", 7)


async def test_a_second_stop_shortens_the_grace_of_the_first(link: KeeperLink) -> None:
    token = new_token()
    heard = await start_ready(link, nasty_argv("ignores_signals", token))
    link.stop(heard.handle, 1_000_000)
    link.stop(heard.handle, 0)
    assert (await heard.end())[0] == "stop"
    assert alive(token) == set()


async def test_a_passed_deadline_ends_the_tree_without_a_word_from_the_host(link: KeeperLink) -> None:
    token = new_token()
    heard = await start_ready(link, nasty_argv("three_sessions", token), lease_ms=2_000)
    assert (await heard.end())[0] == "deadline"
    assert alive(token) == set()


async def test_a_renewed_tree_outlives_its_first_deadline_and_one_given_up_does_not(link: KeeperLink) -> None:
    kept, given_up = start(link, ("sleep", "1000"), lease_ms=1_000), start(link, ("sleep", "1000"), lease_ms=1_000)
    brief = start(link, ("sleep", "1.5"), lease_ms=1_000)
    link.renew(boot_ms() + 60_000, [given_up.handle])
    assert (await given_up.end())[0] == "stop"
    assert await brief.end() == ("exit", 0)
    assert not kept.over.done()
    await _stop_all(link, [kept])


async def test_a_renewal_that_a_thawed_keeper_reads_after_the_deadline_revives_nothing(link: KeeperLink) -> None:
    heard = start(link, ("sleep", "1000"), lease_ms=500)
    past_ms = boot_ms() + 500
    await heard.begun
    assert link._pair is not None
    keeper = link._pair._keeper_pid
    assert keeper is not None
    os.kill(keeper, signal.SIGSTOP)
    wait_until(lambda: boot_ms() > past_ms, "the deadline to pass")
    link.renew(boot_ms() + 60_000, [])
    os.kill(keeper, signal.SIGCONT)
    assert (await heard.end())[0] == "deadline"


async def test_a_tree_may_get_a_nearer_deadline_of_its_own(link: KeeperLink) -> None:
    heard = start(link, ("sleep", "1000"))
    link.set_deadline(heard.handle, 1)
    assert (await heard.end())[0] == "deadline"


async def test_a_start_after_its_deadline_is_refused(link: KeeperLink) -> None:
    heard = start(link, ("true",), lease_ms=-1)
    why, _ = await heard.end()
    assert why.startswith("failed: its lease had ended")


async def test_a_thousand_orders_at_once_are_all_answered(link: KeeperLink) -> None:
    heard = [start(link, ("true",)) for _ in range(1_000)]
    assert {await one.end() for one in heard} == {("exit", 0)}


async def test_closing_the_link_ends_everything(link: KeeperLink) -> None:
    other = KeeperLink()
    await other.open()
    token = new_token()
    heard = await start_ready(other, nasty_argv("runner", token))
    await other.close()
    assert (await heard.end())[0] == "stop"
    assert alive(token) == set()


async def _stop_all(link: KeeperLink, all_heard: list[Heard]) -> None:
    for heard in all_heard:
        link.stop(heard.handle, 0)
    await asyncio.gather(*(heard.end() for heard in all_heard))
