"""What every test runs in. Nothing here imports TensorFlow: the tests of serving do without it.

TensorFlow and ONNX Runtime Extensions in one process crash, so no test may import the latter in its own process.
"""

import os

import pytest

# Before any test module imports Keras; the processes that tests start inherit it.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@pytest.fixture(scope="session")
def deterministic():
    """TensorFlow started as every command starts it: quiet, each operation deterministic."""
    from pipeline.runtime import start_tensorflow

    start_tensorflow()


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Runs commands in processes forked from one that has imported TensorFlow: most of a tiny job is its import."""
    from tests.kills import Forks

    with Forks(tmp_path_factory.mktemp("forks")) as forks:
        yield forks
