"""The processes that train one job together: who they are (TF_CONFIG), and the roll call before they begin.

Nothing here imports TensorFlow.
"""

import contextlib
import dataclasses
import json
import os
import socket
import time

from pipeline.errors import JobError

_LOOK_AROUND_S = 1.0
_ASK_EVERY = 20
_READ_S = 5.0
_ANSWER_S = 60.0  # then it asks again: the chief's machine may be gone
_LONGEST_LINE = 1024
_GO, _REFUSED = b"go\n", b"refused\n"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of one training.

    Attributes:
        addresses: "host:port" of each, the chief's first.
        rank: which of them this process is; 0 is the chief.
    """

    addresses: tuple
    rank: int

    @property
    def is_chief(self):
        """True for the one process that writes."""
        return self.rank == 0

    def call_roll(self, key, note, is_done=lambda: False):
        """Waits until every worker is there, each in its own `call_roll`; returns True.

        TensorFlow would wait too, but deaf to signals, and it takes the server of a training that is just breaking
        down for a worker that is ready.

        Args:
            key: fingerprint of the training; all must have the same.
            note: called with one line that says what is waited for.
            is_done: asked now and then by those who wait for the chief: True when it will not come, since the training
                is finished.

        Returns:
            False when `is_done` said so.

        Raises:
            JobError: this worker's `key` is not the chief's, or its port is taken.
        """
        return self._gather(key, note) if self.is_chief else self._report(key, note, is_done)

    def _gather(self, key, note):
        here = {}  # rank -> connection
        with contextlib.ExitStack() as connections, connections.enter_context(self._listen()) as server:
            server.settimeout(_LOOK_AROUND_S)
            waited_for = None
            while len(here) + 1 < len(self.addresses):
                missing = [self.addresses[r] for r in range(1, len(self.addresses)) if r not in here]
                if missing != waited_for:
                    note(f"waiting for {len(missing)} of {len(self.addresses)} workers: {', '.join(missing)}")
                    waited_for = missing
                with contextlib.suppress(TimeoutError):
                    connection = connections.enter_context(server.accept()[0])
                    rank, their_key = _read_hello(connection)
                    if 0 < rank < len(self.addresses):
                        if their_key == key:
                            here[rank] = connection
                        else:
                            _send(connection, _REFUSED)
                            note(f"worker {self.addresses[rank]} has another job file or other input files")
                here = {rank: connection for rank, connection in here.items() if _is_open(connection)}
            for connection in here.values():
                _send(connection, _GO)
        return True

    def _report(self, key, note, is_done):
        note(f"waiting for the chief, {self.addresses[0]}")
        hello = json.dumps({"rank": self.rank, "key": key}).encode() + b"\n"
        tries, answer = 0, b""
        while answer != _GO:
            if tries % _ASK_EVERY == 0 and is_done():
                return False
            with (
                contextlib.suppress(OSError),
                socket.create_connection(_split(self.addresses[0]), _READ_S) as connection,
            ):
                connection.sendall(hello)
                answer = _read_answer(connection)
            if answer == _REFUSED:
                raise JobError(
                    f"the job file or the input files of this worker ({self.addresses[self.rank]}) are not those of "
                    f"the chief ({self.addresses[0]}). Start every worker with the same job and the same files."
                )
            if answer != _GO:
                tries += 1
                time.sleep(_LOOK_AROUND_S)
        return True

    def _listen(self):
        _, port = _split(self.addresses[self.rank])
        try:
            if socket.has_dualstack_ipv6():
                with contextlib.suppress(OSError):
                    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            return socket.create_server(("", port))
        except OSError as e:
            raise JobError(
                f"TF_CONFIG: cannot listen on port {port} of this worker: {e.strerror}. Give it a free port."
            ) from e


def read_cluster(strategy, environment=os.environ):
    """Returns the `Cluster` that TF_CONFIG describes, or None when this process trains alone.

    Args:
        strategy: `training.strategy` of the job.
        environment: where TF_CONFIG is looked up.

    Raises:
        JobError: TF_CONFIG cannot be used, or names workers that `strategy` has no use for.
    """
    text = environment.get("TF_CONFIG", "").strip()
    cluster = _parse(text) if text else None
    if cluster is None or len(cluster.addresses) == 1:
        return None
    if strategy in ("one", "mirrored"):
        raise JobError(
            f'training.strategy is "{strategy}", but TF_CONFIG names {len(cluster.addresses)} workers. Set it to '
            '"multi_worker" or "auto", or unset TF_CONFIG.'
        )
    return cluster


def _parse(text):
    try:
        config = json.loads(text)
        jobs = config["cluster"]
        task = config["task"]["type"], config["task"]["index"]
        if not all(isinstance(tasks, list) for tasks in jobs.values()):
            raise TypeError("the tasks of a type must be a list of addresses")
        addresses = [*jobs.get("chief", ()), *jobs.get("worker", ())]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise _wrong(f"is not JSON with cluster, task.type and task.index ({type(e).__name__}: {e})") from e
    others = sorted(jobs.keys() - {"chief", "worker"})
    if others:
        raise _wrong(f"names tasks of type {', '.join(others)}; only chief and worker train here")
    if len(jobs.get("chief", ())) > 1:
        raise _wrong("names more than one chief")
    for address in addresses:
        if not isinstance(address, str) or not _split(address)[0] or not 0 < _split(address)[1] < 1 << 16:
            raise _wrong(f"has an address that is not host:port: {address!r}")
    if len(set(addresses)) < len(addresses):
        raise _wrong("names an address twice")
    kind, index = task
    if kind not in list(jobs):
        raise _wrong(f"gives this process the task type {kind!r}, which its cluster does not have")
    if type(index) is not int or not 0 <= index < len(jobs[kind]):
        raise _wrong(f"gives this process the index {index!r}, but its cluster has {len(jobs[kind])} of type {kind}")
    before = len(jobs.get("chief", ())) if kind == "worker" else 0
    return Cluster(tuple(addresses), before + index)


def _wrong(what):
    return JobError(f"the environment variable TF_CONFIG {what}. The README shows one that is right.")


def _split(address):
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port) if port.isascii() and port.isdigit() else 0


def _read_hello(connection):
    """Returns (rank, key); rank 0 for whatever else may have knocked."""
    connection.settimeout(_READ_S)
    try:
        with connection.makefile("rb") as lines:
            hello = json.loads(lines.readline(_LONGEST_LINE))
        return int(hello["rank"]), hello["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""


def _read_answer(connection):
    """Returns the chief's answer; something else when it went away or is not calling the roll."""
    connection.settimeout(_ANSWER_S)
    answer = more = connection.recv(_LONGEST_LINE)
    while more and any(line.startswith(answer) and line != answer for line in (_GO, _REFUSED)):
        more = connection.recv(_LONGEST_LINE)
        answer += more
    return answer


def _is_open(connection):
    try:
        connection.setblocking(False)
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _send(connection, line):
    # One that is gone by now is missed by TensorFlow, which gives it a minute.
    with contextlib.suppress(OSError):
        connection.setblocking(True)
        connection.sendall(line)
