"""Where the time of a training goes."""

import collections
import contextlib
import time


class Clock:
    """Adds up the seconds of named activities: `with clock("saving"): ...`."""

    def __init__(self):
        self._totals = collections.Counter()
        self._laps = {}

    @contextlib.contextmanager
    def __call__(self, activity):
        started = time.monotonic()
        try:
            yield
        finally:
            self._totals[activity] += time.monotonic() - started

    def lap(self, name):
        """Returns activity -> seconds since the last lap of this name, 0 for one that did not take place."""
        before = self._laps.get(name, {})
        self._laps[name] = dict(self._totals)
        return collections.Counter({a: s - before.get(a, 0.0) for a, s in self._totals.items()})
