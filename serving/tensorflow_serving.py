"""Client of TensorFlow Serving: texts or token ids in, labels, probabilities or logits out, over gRPC or REST.

```python
labels = Manifest.read("models/reviews/7").labels
with TensorFlowServingClient("http://localhost:8501", "reviews", labels) as client:
    client.predict(["a fine film"])
```

Over REST it needs what the `serving` extra installs; over gRPC also tensorflow-serving-api, which imports all of
TensorFlow.
"""

import collections.abc
import random
import time

import numpy as np

from pipeline.contract import LABEL, LOGITS, PROBABILITIES, SERVING_SIGNATURE, TEXT, TOKEN_IDS, TOKEN_IDS_SIGNATURE
from pipeline.errors import DataError, JobError, ServingError
from pipeline.text import pad, well_formed
from serving.onnx_classifier import Prediction
from serving.server_config import MAX_BATCH_ROWS
from serving.transport import ModelSpec, connect

_RETRIED = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")  # neither says that the request ran or was wrong
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.0
_POLL_S = 0.2
_POLL_TIMEOUT_S = 5.0


class TensorFlowServingClient:
    """Asks one model. Threads may share one object; close it, or use it in a `with` block.

    An answer that does not come raises `ServingError`, with the server's status as `code`.
    """

    def __init__(
        self,
        address,
        name,
        labels=(),
        *,
        version=0,
        label="",
        timeout_s=30.0,
        retries=5,
        max_batch_rows=MAX_BATCH_ROWS,
        row_length=0,
    ):
        """Connects when the first request is made.

        Args:
            address: "host:8500" for gRPC, "http://host:8501" for REST.
            name: the served model's name.
            labels: label strings in index order, the manifest's `labels`; `predict` alone needs them, since the server
                names only the most probable one.
            version: a version's number; 0: the newest.
            label: a version label, e.g. "stable", in the place of a number.
            timeout_s: seconds for a whole call, with all its requests and retries.
            retries: how often a request is made again that the server could not take (UNAVAILABLE,
                RESOURCE_EXHAUSTED), after pauses of about 0.1, 0.2, 0.4 ... s.
            max_batch_rows: rows in one request; larger inputs are split.
            row_length: rows of ids are padded to at least this many. Give max_length to a server that puts requests
                together (`--enable_batching`): it refuses those of different lengths.

        Raises:
            JobError: an argument cannot be used, or gRPC is not installed.
        """
        if version and label:
            raise JobError(f"give version or label, not both. Received: version={version}, label={label!r}")
        if timeout_s <= 0 or retries < 0 or max_batch_rows < 1:
            raise JobError(
                "timeout_s must be above 0, retries at least 0 and max_batch_rows at least 1. "
                f"Received: timeout_s={timeout_s}, retries={retries}, max_batch_rows={max_batch_rows}"
            )
        self._transport = connect(address)
        self._address = address
        self._spec = ModelSpec(name, version, label)
        self._labels = list(labels)
        self._timeout_s = timeout_s
        self._retries = retries
        self._max_batch_rows = max_batch_rows
        self._row_length = row_length

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """Closes the connections."""
        self._transport.close()

    def predict(self, texts):
        """Returns one `serving.onnx_classifier.Prediction` per text, in order.

        Args:
            texts: any number of str; lone surrogates count as U+FFFD.

        Raises:
            DataError: `texts` is not a list of str.
            JobError: the client was made without `labels`.
            ServingError: no answer, or one that does not fit `labels`.
        """
        if not self._labels:
            raise JobError("predict needs the labels in index order: give the client labels=Manifest.read(DIR).labels.")
        answers = self._classify(texts, (LABEL, PROBABILITIES))
        names = [name for answer in answers for name in answer[LABEL]]
        rows = self._joined(answers, PROBABILITIES)
        columns = {label: i for i, label in enumerate(self._labels)}
        for name, row in zip(names, rows, strict=True):
            if name not in columns or row[columns[name]] < row.max():
                raise self._other_labels(f"it answers {name!r} where these name {self._labels[row.argmax()]!r}")
        return [
            Prediction(name, dict(zip(self._labels, row, strict=True)))
            for name, row in zip(names, rows.tolist(), strict=True)
        ]

    def probabilities(self, texts):
        """Returns float32 [N, C], one row per text in order, columns in label order; raises as `predict`."""
        return self._joined(self._classify(texts, (PROBABILITIES,)), PROBABILITIES)

    def logits(self, token_ids):
        """Returns float32 [N, C] for token ids of the model's own tokenizer.

        Args:
            token_ids: N rows of ids, each of any length, or an array [N, T] with PAD (0) after each row's last id.

        Raises:
            DataError: an id is not an integer from 0 to 2**31 - 1.
            ServingError: no answer; ids outside the vocabulary are refused (INVALID_ARGUMENT).
        """
        rows = [_checked_row(i, row) for i, row in enumerate(token_ids)]
        batches = (pad(batch, self._row_length) for batch in self._split(rows))
        return self._joined(self._ask(TOKEN_IDS_SIGNATURE, TOKEN_IDS, batches, (LOGITS,)), LOGITS)

    def _classify(self, texts, wanted):
        if isinstance(texts, str) or not isinstance(texts, collections.abc.Iterable):
            raise DataError(f"texts must be a list of strings. Received: texts={texts!r:.80}")
        texts = list(texts)
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"texts must be a list of strings. Received: texts={texts!r:.80}")
        return self._ask(SERVING_SIGNATURE, TEXT, self._split([well_formed(text) for text in texts]), wanted)

    def _split(self, rows):
        return [rows[i : i + self._max_batch_rows] for i in range(0, len(rows), self._max_batch_rows)]

    def _ask(self, signature, key, batches, wanted):
        """Returns one answer per batch, each output name -> rows."""
        end = time.monotonic() + self._timeout_s
        answers = []
        for batch in batches:
            answer = self._ask_again(signature, key, batch, wanted, end)
            for name in wanted:
                if len(answer[name]) != len(batch):
                    raise self._failed(ServingError(f"{len(answer[name])} rows for {len(batch)}", "UNKNOWN"), key)
                if name != LABEL and not np.isfinite(answer[name]).all():
                    message = "the answer holds NaN: the model is broken. Go back to the version before"
                    raise self._failed(ServingError(message, "NOT_FINITE"), key)
            answers.append(answer)
        return answers

    def _ask_again(self, signature, key, batch, wanted, end):
        for attempt in range(self._retries + 1):
            try:
                left = max(end - time.monotonic(), 1e-3)
                return self._transport.predict(self._spec, signature, key, batch, wanted, left)
            except ServingError as e:
                # Drawn, so that clients that were refused together do not come back together.
                pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.5)
                is_last = attempt == self._retries or time.monotonic() + pause >= end
                if e.code not in _RETRIED or is_last:
                    raise self._failed(e, key) from e
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _joined(self, answers, name):
        if not answers:
            return np.empty((0, len(self._labels)), np.float32)
        rows = np.concatenate([answer[name] for answer in answers])
        if self._labels and rows.shape[1:] != (len(self._labels),):
            raise self._other_labels(f"it answers with {rows.shape[1]} classes, these are {len(self._labels)}")
        return rows

    def _other_labels(self, message):
        return ServingError(
            f"{self._address}, model {self._spec}: the labels given to the client are not those of this version: "
            f"{message}. Take them from its manifest.json.",
            "FAILED_PRECONDITION",
        )

    def _failed(self, error, key):
        """The error with where, what and what to do."""
        remedy = _remedy(error, key, self._timeout_s)
        message = " ".join(str(error).split())[:500].rstrip(".")
        return ServingError(
            f"{self._address}, model {self._spec}: {error.code}: {message}. {remedy}".rstrip(),
            error.code,
            error.server_message,
        )


def _remedy(error, key, timeout_s):
    if error.code == "NOT_FOUND":
        return "Check the model's name and the version; GET /v1/models/NAME at the REST port lists what is there."
    if error.code == "DEADLINE_EXCEEDED":
        return f"Give fewer rows at once or more time. Received: timeout_s={timeout_s:g}"
    if error.code in _RETRIED:
        return "Check that the server runs and has room (--grpc_max_threads), then try again."
    if "label:" in error.server_message:
        return "Labels are set with `python -m serving tf-config`."
    if key == TEXT and error.code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION"):
        return "A version exported with export.text_signature = false takes token ids alone: call `logits`."
    return ""


def _checked_row(i, row):
    row = np.asarray(row)
    if row.ndim != 1 or row.size and (row.dtype.kind not in "iu" or row.min() < 0 or row.max() >= 2**31):
        raise DataError(f"token_ids must be rows of integers >= 0. Received: token_ids[{i}]={row.tolist()!r:.80}")
    return row.astype(np.int32)


def wait_available(address, name, version, timeout_s=300.0):
    """Returns when the server says that it serves exactly this version.

    Of several servers behind one address it hears one at a time.

    Args:
        address: "host:8500" for gRPC, "http://host:8501" for REST. A server that is not there yet is waited for.
        name: the served model's name.
        version: the version's number.
        timeout_s: seconds to wait.

    Raises:
        JobError: this is no address.
        ServingError: the time is over, or the server has given the version up; with what it last said.
    """
    transport = connect(address)
    end = time.monotonic() + timeout_s
    try:
        while True:
            seen = _look(transport, address, name, version, max(1e-3, min(_POLL_TIMEOUT_S, end - time.monotonic())))
            if seen == "AVAILABLE":
                return
            if time.monotonic() + _POLL_S >= end:
                raise ServingError(
                    f"{address} did not serve {name} version {version} within {timeout_s:g} s; last seen: {seen}. "
                    "Check that it runs and reads the directory that versions are published to, then wait again.",
                    "DEADLINE_EXCEEDED",
                )
            time.sleep(_POLL_S)
    finally:
        transport.close()


def _look(transport, address, name, version, timeout_s):
    """Returns the version's state, or why it is not known. Raises ServingError when it will never be available."""
    try:
        found = transport.state(name, version, timeout_s)
    except ServingError as e:  # not there yet: neither the server, nor the model, nor the version
        return f"{e.code}: {' '.join(str(e).split())[:300]}"
    # While loading is retried the state is LOADING; a version that ended with an error is not tried again.
    if found.state == "END" and found.error_code != "OK":
        message = " ".join(found.error_message.split())[:500].rstrip(".")
        raise ServingError(
            f"{address} gave up on {name} version {version}: {found.error_code}: {message}. A version that was served "
            "before still is. The server's log says more; publish another version.",
            found.error_code,
            found.error_message,
        )
    return found.state
