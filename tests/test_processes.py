"""Signals that end a process."""

from __future__ import annotations

import os
import signal
import time

import pytest

from osciformer._processes import Terminated, terminable


class SignalledWhenDeleted:
    """Gets a signal in a place where Python drops exceptions."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(0.01)


def delete_and_wait(one: SignalledWhenDeleted) -> None:
    del one
    time.sleep(5.0)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_that_comes_as_an_object_is_deleted_is_not_lost(number, kind):
    # A shell lets processes in the background ignore Ctrl-C.
    wanted = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {one: signal.signal(one, handler) for one, handler in wanted.items()}
    try:
        with pytest.raises(kind), terminable():
            delete_and_wait(SignalledWhenDeleted(number))
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
