"""How the client's and the mover's threads give way to the engine's."""

from __future__ import annotations

import os
import select
import threading

import pytest

from kvtier.client.scheduling import give_way, ring


def in_thread(call):
    """What `call` gave, in a thread of its own."""
    out = []
    thread = threading.Thread(target=lambda: out.append(call()))
    thread.start()
    thread.join(30)
    return out[0]


def test_a_thread_that_gives_way_and_those_it_starts_do_not_push_and_others_are_as_before():
    def both():
        give_way()
        return os.sched_getscheduler(0), in_thread(lambda: os.sched_getscheduler(0))

    before = os.sched_getscheduler(0)
    assert in_thread(both) == (os.SCHED_BATCH, os.SCHED_BATCH)
    assert os.sched_getscheduler(0) == before


def test_a_host_that_forbids_it_is_no_error(monkeypatch):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    give_way()


def test_a_bell_that_is_rung_is_heard_once_and_a_full_one_does_not_block():
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        ring(bell)
        ring(bell)
        assert select.select([bell], [], [], 0)[0] == [bell]
        assert os.eventfd_read(bell) == 2
        assert select.select([bell], [], [], 0)[0] == []
        os.eventfd_write(bell, 2**64 - 2)
        ring(bell)
        assert os.eventfd_read(bell) == 2**64 - 2
    finally:
        os.close(bell)
    with pytest.raises(OSError):
        ring(bell)
