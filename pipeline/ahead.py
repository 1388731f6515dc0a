"""Rows and batches of each epoch, made in the background while the epoch before them is trained on."""

import concurrent.futures
import threading
import time

# SentencePiece draws with Python's lock held. Without a pause the thread would have the lock back before the training
# thread, which needs it between two steps, has woken up; that one then waits 5 ms (sys.getswitchinterval) each time.
_PAUSE_S = 1e-4
_LOOK_AROUND_S = 0.05  # how often a waiting `get` looks for a signal


class Ahead:
    """A function of the epoch, called one epoch ahead in one background thread; a context manager.

    Leaving it ends the thread at the next `pause` and waits for that.

    Args:
        make: (epoch, pause) -> anything; a pure function of the epoch that calls `pause()` often, at least every
            few milliseconds where it holds Python's lock.
        epochs: number of all epochs; none beyond is made.
    """

    def __init__(self, make, epochs):
        self._make = make
        self._epochs = epochs
        self._futures = {}
        self._awaited = threading.Event()
        self._closed = threading.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="next-epoch")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._closed.set()
        self._thread.shutdown(cancel_futures=True)

    def get(self, epoch, check=lambda: None):
        """Returns `make` of this epoch and begins with the next one.

        Args:
            epoch: number of the epoch.
            check: called every now and then while it waits; may raise.

        Raises:
            Exception: what `make` or `check` raised.
        """
        future = self._begin(epoch)
        self._awaited.set()
        try:
            while not concurrent.futures.wait([future], _LOOK_AROUND_S).done:
                check()
        finally:
            self._awaited.clear()
        self._futures = {}
        if epoch + 1 < self._epochs:
            self._begin(epoch + 1)
        return future.result()

    def _begin(self, epoch):
        if epoch not in self._futures:
            self._futures[epoch] = self._thread.submit(self._make, epoch, self._pause)
        return self._futures[epoch]

    def _pause(self):
        if self._closed.is_set():
            raise concurrent.futures.CancelledError
        if not self._awaited.is_set():
            time.sleep(_PAUSE_S)
