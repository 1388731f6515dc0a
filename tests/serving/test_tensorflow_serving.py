"""The client of TensorFlow Serving, over both protocols, against a stand-in that speaks them on loopback."""

import concurrent.futures
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import DataError, JobError, ServingError
from serving import tensorflow_serving
from serving.server_config import MAX_BATCH_ROWS
from serving.tensorflow_serving import TensorFlowServingClient, wait_available
from tests.serving.stand_in import StandIn, grpc_server, rest_server
from tests.serving.tiny import LABELS, TEXTS, Tiny

ROOT = Path(__file__).parents[2]
ATOL = 1e-5


@pytest.fixture(scope="module")
def tiny():
    return Tiny.build()


@pytest.fixture(scope="module")
def version_dir(tiny, tmp_path_factory):
    return tiny.write_version(tmp_path_factory.mktemp("models") / "tiny" / "3", precisions=["float32"])


@pytest.fixture
def model(version_dir):
    return StandIn(version_dir)


@pytest.fixture(params=["rest", "grpc"])
def address(request, model):
    with (rest_server if request.param == "rest" else grpc_server)(model) as address:
        yield address


@pytest.fixture
def client(address, monkeypatch):
    monkeypatch.setattr(tensorflow_serving, "_FIRST_PAUSE_S", 0.01)
    with TensorFlowServingClient(address, "tiny", LABELS) as client:
        yield client


def test_what_is_no_list_of_texts(client):
    for texts in ("abc", None, 3, [b"a"], ["a", None]):
        with pytest.raises(DataError, match="texts must be a list of strings"):
            client.predict(texts)


def test_an_iterator_of_texts(client):
    assert len(client.predict(text for text in ["a", "b"])) == 2


def test_an_answer_that_ends_early_is_asked_for_again(monkeypatch):
    """As of a server that is killed while it answers."""
    monkeypatch.setattr(tensorflow_serving, "_FIRST_PAUSE_S", 0.01)
    asked = []

    def serve(listening):
        for _ in range(3):
            connection, _ = listening.accept()
            with connection:
                asked.append(connection.recv(1 << 16))
                connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"outputs": ')

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        client = TensorFlowServingClient(address, "tiny", LABELS, retries=2)
        with client, pytest.raises(ServingError, match="UNAVAILABLE"):
            client.predict(["a"])
    assert len(asked) == 3


def _rows(tiny, texts, max_length=12):
    return [row.tolist() for row in tiny.tokenizer.encode(texts, max_length)]


def test_texts(client, tiny, model):
    expected = tiny.expected_probabilities(TEXTS)
    predictions = client.predict(TEXTS)
    assert [p.label for p in predictions] == [LABELS[i] for i in expected.argmax(axis=1)]
    assert all(list(p.probabilities) == LABELS for p in predictions)
    found = np.array([list(p.probabilities.values()) for p in predictions])
    np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)
    found = client.probabilities(TEXTS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)
    assert model.requests == [("serving_default", len(TEXTS), 0)] * 2
    # A lone surrogate has no UTF-8 form.
    np.testing.assert_array_equal(client.probabilities(["a \udc80 b"]), client.probabilities(["a \ufffd b"]))


def test_ragged_ids_are_padded_and_split_in_order(client, tiny, model):
    texts = [TEXTS[i % len(TEXTS)] + f" {i}" for i in range(2 * MAX_BATCH_ROWS + 6)] + [""]
    found = client.logits(_rows(tiny, texts))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, tiny.expected_logits(texts), rtol=0, atol=1e-4)
    assert [request[:2] for request in model.requests] == [("token_ids", rows) for rows in (32, 32, 7)]
    np.testing.assert_array_equal(client.logits(np.array([[5, 6, 0], [7, 0, 0]])), client.logits([[5, 6], [7]]))
    np.testing.assert_allclose(client.probabilities(texts), tiny.expected_probabilities(texts), rtol=0, atol=ATOL)


def test_rows_of_one_length_for_a_server_that_batches(address, tiny, model):
    with TensorFlowServingClient(address, "tiny", max_batch_rows=2, row_length=12) as client:
        found = client.logits(_rows(tiny, TEXTS[:3]))
    np.testing.assert_allclose(found, tiny.expected_logits(TEXTS[:3]), rtol=0, atol=1e-4)
    assert model.requests == [("token_ids", 2, 12), ("token_ids", 1, 12)]


def test_nothing_is_answered_without_a_request(client, model):
    assert client.predict([]) == []
    assert client.probabilities([]).shape == client.logits([]).shape == (0, len(LABELS))
    assert model.requests == []


@pytest.mark.parametrize("bad", ["a text", ["a", 3], [None]])
def test_bad_texts(client, model, bad):
    with pytest.raises(DataError, match="list of strings"):
        client.predict(bad)
    assert model.requests == []


@pytest.mark.parametrize("bad", [[[0.5]], [[5], [-1]], [[2**31]], [[[5]]], [["a"]], [5]])
def test_bad_ids(client, model, bad):
    with pytest.raises(DataError, match=rf"token_ids\[{len(bad) - 1}\]="):
        client.logits(bad)
    assert model.requests == []


def test_what_a_server_cannot_take_is_asked_again(client, model, tiny):
    model.failures.extend(["UNAVAILABLE", "RESOURCE_EXHAUSTED", "UNAVAILABLE"])
    np.testing.assert_allclose(client.probabilities(TEXTS), tiny.expected_probabilities(TEXTS), rtol=0, atol=ATOL)
    assert len(model.requests) == 4


@pytest.mark.parametrize("code", ["INTERNAL", "INVALID_ARGUMENT", "NOT_FOUND"])
def test_what_it_refuses_is_not_asked_again(client, model, code):
    model.failures.append(code)
    with pytest.raises(ServingError, match=f"model tiny: {code}: asked to fail") as caught:
        client.logits([[5]])
    assert (caught.value.code, caught.value.server_message, caught.value.exit_code) == (code, "asked to fail", 1)
    assert len(model.requests) == 1


def test_retries_end(address, model, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    model.failures.extend(["UNAVAILABLE"] * 9)
    with (
        TensorFlowServingClient(address, "tiny", retries=3) as client,
        pytest.raises(ServingError, match="UNAVAILABLE: asked to fail. Check that the server runs"),
    ):
        client.logits([[5]])
    assert len(model.requests) == 4
    pauses = [pause for pause in pauses if pause > 0.04]  # what the stand-in sleeps is 0
    assert len(pauses) == 3
    for pause, middle in zip(pauses, (0.1, 0.2, 0.4), strict=True):
        assert 0.5 * middle <= pause <= 1.5 * middle


def test_unknown_model_version_label_and_signature(address, model):
    for arguments, call, code, message in [
        ({"name": "other"}, "logits", "NOT_FOUND", "model other: NOT_FOUND: .*Check the model's name and the version"),
        ({"version": 4}, "logits", "NOT_FOUND", "model tiny version 4: NOT_FOUND: .*Check the"),
        ({"label": "canary"}, "logits", "INVALID_ARGUMENT", "label 'canary': .*tf-config"),
        ({}, "probabilities", "INVALID_ARGUMENT", "text_signature = false takes token ids alone: call `logits`"),
    ]:
        model.text_signature = False
        with (
            TensorFlowServingClient(address, **{"name": "tiny", **arguments}) as client,
            pytest.raises(ServingError, match=message) as caught,
        ):
            client.logits([[5]]) if call == "logits" else client.probabilities(["a"])
        assert caught.value.code == code
        assert "\n" not in str(caught.value)
    model.labels["canary"] = 3
    for arguments in ({"label": "canary"}, {"version": 3}):
        with TensorFlowServingClient(address, "tiny", **arguments) as client:
            assert client.logits([[5]]).shape == (1, 3)


def test_ids_outside_the_vocabulary_are_refused(client):
    with pytest.raises(ServingError, match="the vocabulary") as caught:
        client.logits([[400]])
    assert caught.value.code == "INVALID_ARGUMENT"


def test_nan_is_no_answer(client, model):
    model.broken = True
    for call in (lambda: client.logits([[5]]), lambda: client.probabilities(["a"]), lambda: client.predict(["a"])):
        with pytest.raises(ServingError, match="NOT_FINITE: the answer holds NaN") as caught:
            call()
        assert caught.value.code == "NOT_FINITE"


def test_deadline_is_that_of_the_whole_call(address, model):
    model.delay_s = 0.3
    with TensorFlowServingClient(address, "tiny", timeout_s=0.75, max_batch_rows=1) as client:
        assert client.logits([[5]]).shape == (1, 3)
        with pytest.raises(ServingError, match="DEADLINE_EXCEEDED: .*timeout_s=0.75") as caught:
            client.logits([[5]] * 5)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert len(model.requests) <= 1 + 3


def test_labels_that_are_not_those_of_the_version(address):
    for labels, message in [(LABELS[:2], "answers with 3 classes, these are 2"), (LABELS[::-1], "these name")]:
        with (
            TensorFlowServingClient(address, "tiny", labels) as client,
            pytest.raises(ServingError, match=f"not those of this version: .*{message}"),
        ):
            client.predict(TEXTS)
    with TensorFlowServingClient(address, "tiny") as client, pytest.raises(JobError, match="needs the labels"):
        client.predict(TEXTS)


def test_messages_of_many_megabytes(client, tiny):
    texts = [f"{'good film ' * 20_000}{i}" for i in range(MAX_BATCH_ROWS)]  # 6 MB; gRPC's default allows 4
    expected = np.tile(tiny.expected_probabilities(texts[:1]), (len(texts), 1))
    np.testing.assert_allclose(client.probabilities(texts), expected, rtol=0, atol=ATOL)


def test_answer_of_many_megabytes(model):
    """gRPC's default takes 4 MB: with a thousand classes, the probabilities of a thousand rows."""
    model.max_batch_rows = 400_000
    with grpc_server(model) as address, TensorFlowServingClient(address, "tiny", max_batch_rows=400_000) as client:
        found = client.logits(np.full([400_000, 1], 5))
    assert found.shape == (400_000, 3) and (found == found[0]).all()


def test_threads_share_a_client(client, tiny):
    texts = [f"{TEXTS[i % len(TEXTS)]} good {i}" for i in range(64)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = np.concatenate(list(pool.map(lambda text: client.probabilities([text]), texts)))
    np.testing.assert_allclose(found, tiny.expected_probabilities(texts), rtol=0, atol=ATOL)


def test_nobody_there():
    for address in ("127.0.0.1:1", "http://127.0.0.1:1"):
        with TensorFlowServingClient(address, "tiny", retries=1) as client, pytest.raises(ServingError) as caught:
            client.logits([[5]])
        assert caught.value.code == "UNAVAILABLE"
        assert str(caught.value).startswith(f"{address}, model tiny: UNAVAILABLE: ")


def test_a_server_that_was_restarted(model):
    with rest_server(model) as address:
        client = TensorFlowServingClient(address, "tiny", retries=0)
        assert client.logits([[5]]).shape == (1, 3)
    with client, rest_server(model, int(address.rpartition(":")[2])):  # the connection that it kept is closed
        assert client.logits([[5]]).shape == (1, 3)
    assert len(model.requests) == 2


_NO_ADDRESSES = ["", "localhost", "localhost:", "ftp://localhost:1", "http://", "a b:1", "localhost:1/v1", "http://h:x"]


_NO_PORTS = ["localhost:0", "localhost:65536", "http://h:0", "http://a b:1", "http://h:1\n", "h:\uff18\uff15"]


@pytest.mark.parametrize("bad", [*_NO_ADDRESSES, *_NO_PORTS])
def test_bad_address(bad):
    with pytest.raises(JobError, match="host:port for gRPC or http://host:port for REST"):
        TensorFlowServingClient(bad, "tiny")
    with pytest.raises(JobError, match="host:port"):
        wait_available(bad, "tiny", 3)


@pytest.mark.parametrize(
    "bad", [{"timeout_s": 0}, {"retries": -1}, {"max_batch_rows": 0}, {"version": 1, "label": "x"}]
)
def test_bad_arguments(bad):
    with pytest.raises(JobError, match="Received: "):
        TensorFlowServingClient("http://localhost:1", "tiny", **bad)


def test_rest_needs_no_tensorflow(model):
    script = (
        "import sys\n"
        "from serving.tensorflow_serving import TensorFlowServingClient, wait_available\n"
        "wait_available(sys.argv[1], 'tiny', 3)\n"
        "print(TensorFlowServingClient(sys.argv[1], 'tiny').logits([[5]]).shape)\n"
        "print('tensorflow' in sys.modules or 'grpc' in sys.modules)\n"
    )
    with rest_server(model) as address:
        done = subprocess.run([sys.executable, "-c", script, address], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("(1, 3)\nFalse\n", "")


def test_wait_until_exactly_this_version_is_available(address, model):
    loading = ("LOADING", "OK", "")
    model.states[4] = [("START", "OK", ""), loading, loading, ("AVAILABLE", "OK", "")]
    wait_available(address, "tiny", 4, timeout_s=60)
    assert model.states[4] == [("AVAILABLE", "OK", "")]
    wait_available(address, "tiny", 4, timeout_s=0.5)  # and once more


@pytest.mark.parametrize(
    ("version", "states", "seen"),
    [
        (4, [], "NOT_FOUND: Could not find version 4"),
        (4, [("LOADING", "OK", "")], "LOADING"),
        (2, [("END", "OK", "")], "END"),
    ],
)
def test_wait_ends_in_time_with_what_was_seen(address, model, version, states, seen):
    if states:
        model.states[version] = states
    message = f"did not serve tiny version {version} within 0.5 s; last seen: {seen}"
    with pytest.raises(ServingError, match=message) as caught:
        wait_available(address, "tiny", version, timeout_s=0.5)
    assert caught.value.exit_code == 1


def test_another_version_is_not_this_one(address, model, monkeypatch):
    monkeypatch.setattr(model, "look", lambda name, version: {3: ("AVAILABLE", "OK", "")})
    with pytest.raises(ServingError, match="last seen: UNKNOWN: it gave the status of other versions"):
        wait_available(address, "tiny", 4, timeout_s=0.3)


def test_wait_ends_at_once_when_the_version_failed(address, model):
    model.states[4] = [("LOADING", "OK", ""), ("END", "INVALID_ARGUMENT", "warm-up\nfailed")]
    with pytest.raises(ServingError, match="gave up on tiny version 4: INVALID_ARGUMENT: warm-up failed") as caught:
        wait_available(address, "tiny", 4, timeout_s=20)
    assert caught.value.server_message == "warm-up\nfailed"


def test_wait_for_a_server_that_is_not_there():
    for address in ("127.0.0.1:1", "http://127.0.0.1:1"):
        with pytest.raises(ServingError, match="within 0.5 s; last seen: UNAVAILABLE"):
            wait_available(address, "tiny", 3, timeout_s=0.5)
