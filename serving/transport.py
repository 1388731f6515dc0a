"""The two ways to reach TensorFlow Serving: gRPC at `host:port`, REST at `http://host:port`.

Both answer alike, raise `ServingError` alike, and may be used by many threads at once. REST needs NumPy alone; gRPC
imports `tensorflow_serving.apis`, and with it all of TensorFlow, when a transport is made.
"""

import collections
import dataclasses
import http.client
import json
import re
import socket
import time
import urllib.parse

import numpy as np

from pipeline.errors import JobError, ServingError

MESSAGE_BYTES = 1 << 30  # gRPC refuses more than 4 MB unless told otherwise: less than 32 long texts
_GRPC_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s/:@\[\]]+):([0-9]{1,5})")
_REST_CODES = {  # ToHTTPStatusCode in tensorflow_serving/model_servers/http_server.cc; 400 also FAILED_PRECONDITION
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Which model is asked, and which version of it: by number, by label, or (both empty) the newest.

    Attributes:
        name: the served model's name.
        version: a version's number, 0 for none.
        label: e.g. "stable", "" for none.
    """

    name: str
    version: int = 0
    label: str = ""

    def __str__(self):
        choice = f" version {self.version}" if self.version else f" label {self.label!r}" if self.label else ""
        return self.name + choice


@dataclasses.dataclass(frozen=True)
class VersionState:
    """What a server says of one version: its state, e.g. "AVAILABLE", and the error that led there, if any."""

    state: str
    error_code: str
    error_message: str


def connect(address):
    """Returns the transport for an address.

    Raises:
        JobError: it is no address, or gRPC is not installed.
    """
    check_address(address)
    return _Rest(address) if "://" in address else _Grpc(address)


def check_address(address):
    """Raises JobError unless `address` is `host:port` or an http:// or https:// URL."""
    try:
        url = urllib.parse.urlsplit(address)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        is_url = is_url and not any(map(str.isspace, address))  # which urlsplit drops in part
    except ValueError:  # a port that is no number, or too high
        is_url = False
    grpc = _GRPC_ADDRESS.fullmatch(address)
    if not (is_url or grpc and 0 < int(grpc[2]) < 1 << 16):  # gRPC would take a higher one modulo that
        raise JobError(
            "a server's address must be host:port for gRPC or http://host:port for REST, e.g. localhost:8500 or "
            f"http://localhost:8501. Received: {address}"
        )


class _Rest:
    def __init__(self, address):
        url = urllib.parse.urlsplit(address)
        self._class = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._prefix = url.hostname, url.port, url.path.rstrip("/")
        self._idle = collections.deque()  # its operations are atomic: threads need no lock

    def predict(self, spec, signature, key, rows, wanted, timeout_s):
        """Runs one request.

        Args:
            spec: a `ModelSpec`.
            signature: its signature.
            key: the name of its input.
            rows: a list of str, or int32 [B, T].
            wanted: names of the outputs.
            timeout_s: seconds until DEADLINE_EXCEEDED.

        Returns:
            output name -> array; strings as a list of str.
        """
        rows = rows.tolist() if isinstance(rows, np.ndarray) else rows
        body = json.dumps({"signature_name": signature, "inputs": {key: rows}}).encode()
        answer = self._request("POST", self._path(spec) + ":predict", body, timeout_s)
        try:
            # Of several outputs it is an object; NaN is printed bare, which Python's JSON takes.
            found = {name: answer["outputs"][name] for name in wanted}
            return {k: v if isinstance(v[0], str) else np.array(v, np.float32) for k, v in found.items()}
        except (TypeError, KeyError, IndexError, ValueError) as e:
            raise _not_understood(f"an answer without {', '.join(wanted)}") from e

    def state(self, name, version, timeout_s):
        """Returns the `VersionState` of a version."""
        answer = self._request("GET", self._path(ModelSpec(name, version)), None, timeout_s)
        try:
            for status in answer["model_version_status"]:
                if int(status["version"]) == version:  # a string
                    of = status.get("status", {})
                    return VersionState(status["state"], of.get("error_code", "OK"), of.get("error_message", ""))
        except (TypeError, KeyError, AttributeError, ValueError) as e:
            raise _not_understood("a status of another form") from e
        raise _not_understood("the status of other versions")

    def close(self):
        while self._idle:
            self._idle.pop().close()

    def _path(self, spec):
        choice = f"/versions/{spec.version}" if spec.version else ""
        choice = f"/labels/{urllib.parse.quote(spec.label, safe='')}" if spec.label else choice
        return f"{self._prefix}/v1/models/{urllib.parse.quote(spec.name, safe='')}{choice}"

    def _request(self, method, path, body, timeout_s):
        end = time.monotonic() + timeout_s
        while True:
            try:
                connection, is_new = self._idle.pop(), False
            except IndexError:
                connection, is_new = self._class(self._host, self._port), True
            try:
                status, data = _exchange(connection, method, path, body, end)
                break
            except TimeoutError as e:
                connection.close()
                raise ServingError("no answer in time", "DEADLINE_EXCEEDED") from e
            except (OSError, http.client.HTTPException) as e:
                connection.close()
                if is_new:  # an idle one may have been closed by the server long ago: try the next
                    message = getattr(e, "strerror", None) or str(e) or type(e).__name__
                    raise ServingError(message, "UNAVAILABLE", message) from e
        self._idle.append(connection)
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if status == 200 and answer is not None:
            return answer
        given = answer.get("error") if isinstance(answer, dict) else None
        message = str(given or data[:200].decode("utf-8", "replace") or f"HTTP status {status}")
        raise ServingError(message, _REST_CODES.get(status, "UNKNOWN"), message)


def _exchange(connection, method, path, body, end):
    """Returns (status, body) of one HTTP request that is over at the time `end`."""

    def left():
        seconds = end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds

    connection.timeout = left()
    if connection.sock is None:
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock = connection.sock
    sock.settimeout(left())
    connection.request(method, path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    parts = []
    while part := response.read1(1 << 20):
        parts.append(part)
        sock.settimeout(left())
    if response.length:  # read1 does not say that the server ended before its answer did
        raise http.client.IncompleteRead(b"".join(parts), response.length)
    response.close()  # or the connection would take no other request
    return response.status, b"".join(parts)


class _Grpc:
    def __init__(self, address):
        try:
            import grpc
            import tensorflow as tf
            from tensorflow_serving.apis import (
                get_model_status_pb2,
                model_pb2,
                model_service_pb2_grpc,
                predict_pb2,
                prediction_service_pb2_grpc,
            )
        except ImportError as e:
            raise JobError(
                f"gRPC needs the package tensorflow-serving-api ({e}). Install it, or give the address of the REST "
                f"port, e.g. http://localhost:8501. Received: {address}"
            ) from e
        self._grpc, self._tf = grpc, tf
        self._status_pb2, self._model_pb2, self._predict_pb2 = get_model_status_pb2, model_pb2, predict_pb2
        options = {
            "grpc.max_send_message_length": MESSAGE_BYTES,
            "grpc.max_receive_message_length": MESSAGE_BYTES,
            # One connection for each address that the host's name has, e.g. for each pod of a headless Service.
            "grpc.lb_policy_name": "round_robin",
            # A server that was away is found again within a second; the default waits up to two minutes.
            "grpc.initial_reconnect_backoff_ms": 100,
            "grpc.max_reconnect_backoff_ms": 1000,
            "grpc.enable_http_proxy": 0,
        }
        self._channel = grpc.insecure_channel(address, list(options.items()))
        self._prediction = prediction_service_pb2_grpc.PredictionServiceStub(self._channel)
        self._model = model_service_pb2_grpc.ModelServiceStub(self._channel)

    def predict(self, spec, signature, key, rows, wanted, timeout_s):
        """As of `_Rest`."""
        tf = self._tf
        tensor = tf.make_tensor_proto(rows, tf.string if isinstance(rows, list) else tf.int32)
        request = self._predict_pb2.PredictRequest(
            model_spec=self._spec(spec, signature), inputs={key: tensor}, output_filter=wanted
        )
        answer = self._call(self._prediction.Predict, request, timeout_s)
        try:
            found = {name: tf.make_ndarray(answer.outputs[name]) for name in wanted}
        except (TypeError, ValueError) as e:
            raise _not_understood(f"an answer without {', '.join(wanted)}") from e
        return {k: [s.decode() for s in v] if v.dtype == object else v for k, v in found.items()}

    def state(self, name, version, timeout_s):
        """As of `_Rest`."""
        request = self._status_pb2.GetModelStatusRequest(model_spec=self._spec(ModelSpec(name, version), ""))
        answer = self._call(self._model.GetModelStatus, request, timeout_s)
        for status in answer.model_version_status:
            if status.version == version:
                state = self._status_pb2.ModelVersionStatus.State.Name(status.state)
                codes = status.status.DESCRIPTOR.fields_by_name["error_code"].enum_type.values_by_number
                return VersionState(state, codes[status.status.error_code].name, status.status.error_message)
        raise _not_understood("the status of other versions")

    def close(self):
        self._channel.close()

    def _spec(self, spec, signature):
        proto = self._model_pb2.ModelSpec(name=spec.name, signature_name=signature)
        if spec.version:
            proto.version.value = spec.version
        elif spec.label:
            proto.version_label = spec.label
        return proto

    def _call(self, method, request, timeout_s):
        try:
            return method(request, timeout=timeout_s)
        except self._grpc.RpcError as e:
            message = e.details() or "no message"
            raise ServingError(message, e.code().name, message) from e
        except ValueError as e:  # the channel is closed
            raise ServingError(str(e), "CANCELLED", str(e)) from e


def _not_understood(what):
    return ServingError(f"it gave {what}; is this TensorFlow Serving?", "UNKNOWN")
