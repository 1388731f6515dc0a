"""Stands in for TensorFlow Serving: its gRPC and REST protocols on loopback, over an ONNX session.

It answers with the real messages and status codes for what the client does, and no more: tests/serving/
test_model_server.py runs against the real server where there is one.
"""

import collections
import concurrent.futures
import contextlib
import http.server
import json
import re
import threading
import time

import numpy as np

from pipeline.text import pad
from serving.onnx_classifier import OnnxClassifier

_HTTP = {"INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "NOT_FOUND": 404, "RESOURCE_EXHAUSTED": 429}
_HTTP |= {"INTERNAL": 500, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504}


class Refused(Exception):
    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class StandIn:
    """The server's model manager: one model, its versions, and what is to go wrong.

    Attributes:
        states: version -> [(state, error code, error message), ...]; each look takes one, the last stays.
        labels: version label -> version.
        text_signature: whether `serving_default` takes text.
        failures: codes that the next requests are refused with.
        delay_s: how long every answer takes.
        broken: whether answers hold NaN.
        max_batch_rows: max_batch_size of the server.
        requests: (signature, rows, columns or 0) of the requests that came.
    """

    def __init__(self, version_dir, name="tiny"):
        self.classifier = OnnxClassifier.load(version_dir, threads=1)
        self.name = name
        self.states = {3: [("AVAILABLE", "OK", "")]}
        self.labels = {}
        self.text_signature = True
        self.failures = collections.deque()
        self.delay_s = 0.0
        self.broken = False
        self.max_batch_rows = 1024
        self.requests = []

    def predict(self, name, version, label, signature, inputs):
        """Returns output name -> array or list of str."""
        ((key, rows),) = inputs.items()
        self.requests.append((signature, len(rows), rows.shape[1] if isinstance(rows, np.ndarray) else 0))
        time.sleep(self.delay_s)
        if self.failures:
            raise Refused(self.failures.popleft(), "asked to fail")
        if label and label not in self.labels:
            raise Refused("INVALID_ARGUMENT", f"Unrecognized servable version label: {label}")
        version = self.labels[label] if label else version or max(self.states)
        if name != self.name or version not in self.states or self.states[version][-1][0] != "AVAILABLE":
            raise Refused("NOT_FOUND", f"Servable not found for request: Specific({name}, {version})")
        expected = {"serving_default": "text" if self.text_signature else "token_ids", "token_ids": "token_ids"}
        if signature not in expected:
            raise Refused("FAILED_PRECONDITION", f'Serving signature key "{signature}" not found.')
        if key != expected[signature]:
            raise Refused(
                "INVALID_ARGUMENT",
                f"input size does not match signature: 1!=1 len({{{key}}}) != len({{{expected[signature]}}}).",
            )
        if len(rows) > self.max_batch_rows:
            raise Refused("INVALID_ARGUMENT", "the batch is larger than the maximum")
        return self._answer(rows)

    def _answer(self, rows):
        is_text = isinstance(rows, list)
        max_length = self.classifier.max_length
        ids = pad(self.classifier._tokenizer.encode(rows, max_length)) if is_text else rows
        if ids.min() < 0 or ids.max() >= self.classifier._tokenizer.vocab_size:
            raise Refused("INVALID_ARGUMENT", "assertion failed: [token_ids must be >= 0 and < 400, the vocabulary]")
        logits, probabilities = self.classifier._session.run(["logits", "probabilities"], {"token_ids": ids})
        if self.broken:
            logits, probabilities = logits * np.nan, probabilities * np.nan
        best = probabilities.argmax(axis=1)
        first = {"label": [self.classifier.labels[i] for i in best]} if is_text else {"logits": logits}
        return {**first, "probabilities": probabilities}

    def look(self, name, version):
        """Returns version -> (state, error code, error message); version 0: of all."""
        if name != self.name or (version and version not in self.states):
            raise Refused("NOT_FOUND", f"Could not find version {version} of model {name}")
        found = {}
        for v in [version] if version else self.states:
            found[v] = self.states[v].pop(0) if len(self.states[v]) > 1 else self.states[v][0]
        return found


@contextlib.contextmanager
def rest_server(model, port=0):
    """Yields the address of a REST server for a `StandIn`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        path_form = re.compile(r"/v1/models/([^/:]+)(?:/versions/(\d+)|/labels/([^/:]+))?(:predict)?")

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._reply(lambda *spec: self._predict(body, *spec))

        def do_GET(self):
            self._reply(self._status)

        def _predict(self, body, *spec):
            ((key, rows),) = body["inputs"].items()
            rows = np.array(rows, np.int32) if key != "text" else rows
            outputs = model.predict(*spec, body.get("signature_name", "serving_default"), {key: rows})
            return {"outputs": {k: v if isinstance(v, list) else v.tolist() for k, v in outputs.items()}}

        def _status(self, name, version, label):
            found = model.look(name, version)
            return {
                "model_version_status": [
                    {"version": str(v), "state": state, "status": {"error_code": code, "error_message": message}}
                    for v, (state, code, message) in found.items()
                ]
            }

        def _reply(self, answer):
            name, version, label, _ = self.path_form.fullmatch(self.path).groups()
            try:
                status, found = 200, answer(name, int(version or 0), label or "")
            except Refused as e:
                status, found = _HTTP[e.code], {"error": str(e)}
            data = json.dumps(found, indent=4).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client did not wait
                self.wfile.write(data)

        def log_message(self, *args):
            pass

    class Server(http.server.ThreadingHTTPServer):
        connections = []

        def finish_request(self, request, client_address):
            self.connections.append(request)
            super().finish_request(request, client_address)

    with Server(("127.0.0.1", port), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            for connection in server.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(2)


@contextlib.contextmanager
def grpc_server(model):
    """Yields the address of a gRPC server for a `StandIn`. Imports TensorFlow."""
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis import (
        get_model_status_pb2,
        model_service_pb2_grpc,
        predict_pb2,
        prediction_service_pb2_grpc,
    )

    def answered(answer, context):
        try:
            return answer()
        except Refused as e:
            context.abort(grpc.StatusCode[e.code], str(e))

    class Prediction(prediction_service_pb2_grpc.PredictionServiceServicer):
        def Predict(self, request, context):
            return answered(lambda: self._predict(request), context)

        def _predict(self, request):
            spec = request.model_spec
            inputs = {key: tf.make_ndarray(tensor) for key, tensor in request.inputs.items()}
            inputs = {k: [s.decode() for s in v] if v.dtype == object else v for k, v in inputs.items()}
            signature = spec.signature_name or "serving_default"
            outputs = model.predict(spec.name, spec.version.value, spec.version_label, signature, inputs)
            response = predict_pb2.PredictResponse()
            for key in request.output_filter or outputs:
                response.outputs[key].CopyFrom(tf.make_tensor_proto(outputs[key]))
            return response

    class Model(model_service_pb2_grpc.ModelServiceServicer):
        def GetModelStatus(self, request, context):
            return answered(lambda: self._status(request.model_spec), context)

        def _status(self, spec):
            response = get_model_status_pb2.GetModelStatusResponse()
            for version, (state, code, message) in model.look(spec.name, spec.version.value).items():
                found = response.model_version_status.add(version=version, state=state)
                codes = found.status.DESCRIPTOR.fields_by_name["error_code"].enum_type.values_by_name
                found.status.error_code, found.status.error_message = codes[code].number, message
            return response

    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(16), options=unlimited)
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Prediction(), server)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(Model(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
