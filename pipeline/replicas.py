"""Where a training step runs: on one device, on every GPU of this machine, or on those of several workers.

Every replica computes the gradients of its rows; summed over all replicas they are those of the whole batch, and each
replica then moves its own copy of the weights by the same sum.
"""

import contextlib
import json

import numpy as np
import tensorflow as tf

from pipeline import errors
from pipeline.errors import Interrupted, JobError, PipelineError, TrainingError

_HEARTBEAT_TIMEOUT_MS = 30_000  # a killed process is noticed at once; this is for a machine that is gone, or frozen
_REGISTER_TIMEOUT_MS = 120_000  # all have answered the roll call: only one that died since then is waited for


def open_replicas(strategy, cluster):
    """Returns the replicas that a job trains on.

    Args:
        strategy: `training.strategy` of the job.
        cluster: a `pipeline.cluster.Cluster`, or None when this process trains alone.

    Raises:
        JobError: "mirrored" without two GPUs, "multi_worker" without a cluster.
        TrainingError: a worker that had answered the roll call did not come.
    """
    if cluster is not None:
        return MultiWorker(cluster)
    if strategy == "multi_worker":
        raise JobError(
            'training.strategy is "multi_worker", but the environment variable TF_CONFIG names no other worker. The '
            'README shows how to start them; "auto" trains alone.'
        )
    gpus = tf.config.list_logical_devices("GPU")
    if strategy == "mirrored" and len(gpus) < 2:
        raise JobError(
            f'training.strategy is "mirrored", which needs two GPUs, but TensorFlow sees {len(gpus)}. Use "auto".'
        )
    if strategy != "one" and len(gpus) > 1:
        return Mirrored(tf.distribute.MirroredStrategy([gpu.name for gpu in gpus]))
    return OneDevice()


class OneDevice:
    """One replica in one process; nothing of it is in the compiled step."""

    count = 1
    is_chief = True

    def scope(self):
        """A context; every variable of the state is created in it."""
        return contextlib.nullcontext()

    def compile(self, function, signature):
        """Returns `function` compiled; it is called on every replica, with the same arguments."""
        return tf.function(function, input_signature=signature)

    def share(self, rows):
        """Returns this replica's share of the rows [B, ...] of a batch; inside of a compiled function."""
        return rows

    def sum(self, tensors):
        """Returns a list of tensors, each summed over the replicas; inside of a compiled function, once."""
        return tensors

    def from_chief(self, function):
        """Returns what `function`, called on the chief only, returned there: JSON values.

        Raises:
            PipelineError: what it raised there, on every worker.
        """
        return function()

    def copy_from_chief(self, variables):
        """Gives all workers the chief's values."""

    def agreed(self, stop):
        """Returns an object whose `check()` raises Interrupted at the same step on all workers."""
        return stop

    def watched(self):
        """A context in which the loss of a worker is a `TrainingError`."""
        return contextlib.nullcontext()


class Mirrored(OneDevice):
    """Several replicas in one process.

    Args:
        strategy: a `tf.distribute.MirroredStrategy`.
    """

    def __init__(self, strategy):
        self.strategy = strategy
        self.count = strategy.num_replicas_in_sync

    def scope(self):
        return self.strategy.scope()

    def compile(self, function, signature):
        @tf.function(input_signature=signature)
        def on_every_replica(*args):
            results = self.strategy.run(function, args)
            return tf.nest.map_structure(lambda r: self.strategy.experimental_local_results(r)[0], results)

        return on_every_replica

    def share(self, rows):
        # Row 0, n, 2n, ... for replica 0: none at all when the batch is smaller than the number of replicas.
        return rows[tf.distribute.get_replica_context().replica_id_in_sync_group :: self.count]

    def sum(self, tensors):
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)


class MultiWorker(Mirrored):
    """Replicas in several processes, one or more in each.

    Args:
        cluster: a `pipeline.cluster.Cluster`.

    Raises:
        TrainingError: a worker did not come.
    """

    def __init__(self, cluster):
        self.is_chief = cluster.is_chief
        with self.watched():
            super().__init__(_connect(cluster))
            with self.scope():
                # Part of each step's sum: how many replicas are asked to stop, and how many were in the last step.
                self._asked, self._agreed = (tf.Variable(0.0, trainable=False) for _ in range(2))
            # Passed through a sum, to which all but the first replica add zeros. In 16 bits at a time: floats are
            # summed everywhere, and hold those exactly.
            self._from_first = self.compile(self._sum_of_first, [tf.TensorSpec([None], tf.float32)])

    def sum(self, tensors):
        *sums, agreed = super().sum([*tensors, self._asked.read_value()])
        self._agreed.assign(agreed)
        return sums

    def from_chief(self, function):
        told, raised = {}, None
        if self.is_chief:
            try:
                told = {"result": function()}
            except PipelineError as e:
                told, raised = {"error": type(e).__name__, "message": str(e)}, e
        text = json.dumps(told).encode()
        (length,) = np.frombuffer(self._bytes_from_chief(np.int64(len(text)).tobytes()), np.int64)
        told = json.loads(self._bytes_from_chief(text.ljust(length)[:length]))
        if "error" in told:
            raise raised or getattr(errors, told["error"])(told["message"])
        return told["result"]

    def copy_from_chief(self, variables):
        for variable in variables:
            value = variable.numpy()
            copied = np.frombuffer(self._bytes_from_chief(value.tobytes()), value.dtype)
            variable.assign(copied.reshape(value.shape))

    def agreed(self, stop):
        return _AgreedStop(stop, self._asked, self._agreed)

    @contextlib.contextmanager
    def watched(self):
        try:
            yield
        except (
            tf.errors.AbortedError,
            tf.errors.CancelledError,
            tf.errors.DeadlineExceededError,
            tf.errors.FailedPreconditionError,
            tf.errors.InternalError,
            tf.errors.UnavailableError,
        ) as e:
            # Of a page, the line that has the reason.
            reason = next((line for line in str(e.message).splitlines() if "aborted by" in line), type(e).__name__)
            raise TrainingError(
                "another worker of this job has ended or cannot be reached; its own log may say why. What was saved "
                "is good: start all workers again to go on from the newest checkpoint. TensorFlow says: "
                f"{reason[:200]}"
            ) from e

    def _sum_of_first(self, values):
        context = tf.distribute.get_replica_context()
        mine = values if context.replica_id_in_sync_group == 0 else tf.zeros_like(values)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

    def _bytes_from_chief(self, data):
        """Returns the chief's bytes; all workers give equally many."""
        words = np.frombuffer(data.ljust(len(data) + len(data) % 2, b"\0"), np.uint16)
        return self._from_first(words.astype(np.float32)).numpy().astype(np.uint16).tobytes()[: len(data)]


class _AgreedStop:
    def __init__(self, stop, asked, agreed):
        self._stop, self._asked, self._agreed = stop, asked, agreed

    def check(self):
        if self._stop.signal is not None:
            self._asked.assign(1.0)
        if self._agreed.numpy() > 0:
            self._stop.check()
            raise Interrupted("stopped by a signal to another worker")


def _connect(cluster):
    # No public way leads to these timeouts; without, TensorFlow waits an hour for a worker that died in between.
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
    from tensorflow.python.eager import context

    workers = coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=len(cluster.addresses))
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=_REGISTER_TIMEOUT_MS,
        heartbeat_timeout_in_ms=_HEARTBEAT_TIMEOUT_MS,
        coordinated_jobs=[workers],
    )
    # Not from TF_CONFIG: whatever it calls the chief, here worker 0 is.
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(cluster.addresses)}),
        task_type="worker",
        task_id=cluster.rank,
        num_accelerators={"GPU": len(tf.config.list_physical_devices("GPU"))},
        rpc_layer="grpc",
    )
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
