"""Starting TensorFlow for a command: quiet, deterministic."""

import contextlib
import ctypes
import os
import sys
import tempfile


def start_tensorflow():
    """Imports TensorFlow and Keras without their start-up log lines and makes every operation deterministic.

    TensorFlow writes to file descriptor 2 before its own log level counts, so the descriptor is turned away
    while it starts; when the import fails, what it wrote is shown.
    """
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # The process that verifies the artifacts needs GPU memory beside the one that trained.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    with _stderr_held_back():
        import tensorflow as tf

        tf.config.list_physical_devices()  # the GPU driver is looked for now, and its absence logged
    tf.get_logger().setLevel("ERROR")
    tf.config.experimental.enable_op_determinism()
    tf.config.experimental.enable_tensor_float_32_execution(False)  # float32 is float32 on a GPU too


def trim_memory():
    """Gives the system back what is free in this process, where the C library can (glibc).

    A validation and a save leave some 30 MB of free memory scattered over the heap, that would stay with the process.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _stderr_held_back():
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except ImportError:
            held.seek(0)
            os.write(saved, held.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
