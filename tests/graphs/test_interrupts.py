"""Signals during what must not be torn apart."""

import os
import signal
import threading

import pytest

from msds_graphs.interrupts import held_back


def send(number):
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _handlers():
    """As in a foreground process: one that a shell has put into the background ignores SIGINT."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_end(number, caplog):
    done = []

    @held_back("the work")
    def work():
        send(number)
        send(number)
        done.append("work")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["work"]
    assert caplog.messages == ["interrupted: ends when the work is done, which may take a while"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_hears_it_afterwards():
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    with held_back("the work"), held_back("a part of it"):
        send(signal.SIGTERM)
        assert heard == []
    assert heard == [signal.SIGTERM]


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with held_back("the work"):
        send(signal.SIGTERM)


def test_an_error_of_the_work_comes_first():
    @held_back("the work")
    def work():
        send(signal.SIGINT)
        raise ValueError("the work failed")

    with pytest.raises(ValueError, match="the work failed"):
        work()


def test_other_threads_change_no_handler():
    seen = []

    def work():
        with held_back("the work"):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
