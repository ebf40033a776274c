"""What other threads ask of the loop: once, on its thread, or never."""

from __future__ import annotations

import threading

import pytest

from kvtier.server.inbox import Inbox, NotDoneError


class Loop:
    """A loop that runs the inbox when its bell rings."""

    def __init__(self) -> None:
        self.bell = threading.Event()
        self.inbox = Inbox(self.bell.set)
        self.failures = 0
        self.over = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self.over:
            assert self.bell.wait(30)
            self.bell.clear()
            self.inbox.run(self._failed)

    def _failed(self) -> None:
        self.failures += 1

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.bell.set()
        self.thread.join(30)


def test_an_action_runs_on_the_loops_thread_and_its_result_comes_back():
    with Loop() as loop:
        ran: list[float] = []
        assert loop.inbox.ask(lambda now: (ran.append(now), threading.current_thread())[1], 30) is loop.thread
        assert len(ran) == 1
        assert ran[0] > 0


def test_an_error_comes_back_and_the_loop_is_told():
    with Loop() as loop:

        def broken(now: float) -> None:
            raise ZeroDivisionError("asked for it")

        with pytest.raises(ZeroDivisionError, match="asked for it"):
            loop.inbox.ask(broken, 30)
        assert loop.inbox.ask(lambda now: 7, 30) == 7
        assert loop.failures == 1


def test_what_was_given_up_is_never_done():
    inbox = Inbox(lambda: None)
    done: list[int] = []
    with pytest.raises(NotDoneError, match=r"nothing was done"):
        inbox.ask(lambda now: done.append(1), 0.01)
    inbox.run(lambda: None)
    assert done == []


def test_what_has_begun_is_waited_for():
    begun, go_on = threading.Event(), threading.Event()

    def slow(now: float) -> str:
        begun.set()
        assert go_on.wait(30)
        return "done"

    with Loop() as loop:
        answers: list[str] = []
        asker = threading.Thread(target=lambda: answers.append(loop.inbox.ask(slow, 0.2)))
        asker.start()
        assert begun.wait(30)
        # Its time is over while it runs: it cannot be given up any more.
        threading.Timer(0.3, go_on.set).start()
        asker.join(30)
    assert answers == ["done"]


def test_after_the_loops_end_everyone_is_told():
    inbox = Inbox(lambda: None)
    told: list[str] = []
    rung = threading.Event()
    inbox._ring = rung.set

    def ask() -> None:
        with pytest.raises(NotDoneError) as caught:
            inbox.ask(lambda now: 1, 30)
        told.append(str(caught.value))

    asker = threading.Thread(target=ask)
    asker.start()
    assert rung.wait(30)
    inbox.close()
    asker.join(30)
    ask()
    assert len(told) == 2
    assert all("ending" in text for text in told)
