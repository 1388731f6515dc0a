import itertools
import threading
import time

import pytest

from pipeline.ahead import Ahead


def test_each_epoch_is_made_once_and_one_ahead():
    made, second = [], threading.Event()

    def make(epoch, pause):
        pause()
        made.append((epoch, threading.current_thread() is threading.main_thread()))
        if epoch == 3:
            second.set()
        return epoch * 10

    with Ahead(make, 5) as ahead:
        assert ahead.get(2) == 20
        second.wait()  # made without being asked for
        assert [ahead.get(3), ahead.get(4)] == [30, 40]
    assert made == [(2, False), (3, False), (4, False)]  # and none beyond the last


def test_what_make_raises_is_raised_where_its_epoch_is_asked_for():
    def make(epoch, pause):
        if epoch == 1:
            raise ZeroDivisionError("epoch 1")
        return epoch

    with Ahead(make, 3) as ahead:
        assert ahead.get(0) == 0
        with pytest.raises(ZeroDivisionError, match="epoch 1"):
            ahead.get(1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_leaving_ends_what_would_never_end(error):
    def make(epoch, pause):
        for _ in itertools.count():
            pause()

    def check():
        raise error

    with pytest.raises(error), Ahead(make, 3) as ahead:
        ahead.get(0, check)
    with Ahead(lambda epoch, pause: epoch and make(epoch, pause), 3) as ahead:
        ahead.get(0)
        time.sleep(0.01)  # the next one is being made
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("next-epoch")]


def test_other_threads_go_on_while_it_works():
    """Work that holds Python's lock for 0.1 ms between pauses: who needs the lock gets it after about one such piece.

    Without the pauses it would be after the 5 ms of the switch interval, 50 pieces.
    """
    pieces = 0

    def make(epoch, pause):
        nonlocal pieces
        while epoch:
            end = time.thread_time() + 1e-4
            while time.thread_time() < end:
                pass
            pieces += 1
            pause()

    turns = 200
    with Ahead(make, 2) as ahead:
        ahead.get(0)
        for _ in range(turns):
            time.sleep(1e-4)  # lets go of the lock and needs it again
        assert 0 < pieces < 15 * turns
