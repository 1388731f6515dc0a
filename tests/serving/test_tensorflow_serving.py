"""Warm-up records as TensorFlow Serving reads them: an uncompressed TFRecord of PredictionLog."""

import struct

import numpy as np
import pytest

from tests.jobs import MAX_LENGTH, published_job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return published_job(tmp_path_factory)


def _records(data):
    """The payloads of a TFRecord file, read by hand: length, its checksum, payload, its checksum."""
    records = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert length <= len(data) - 16, "not an uncompressed TFRecord"
        records.append(data[12 : 12 + length])
        data = data[16 + length :]
    return records


def test_published_warmup_records(job):
    from tensorflow_serving.apis import prediction_log_pb2

    data = (job.model_dir / "1" / "assets.extra" / "tf_serving_warmup_requests").read_bytes()
    logs = [prediction_log_pb2.PredictionLog.FromString(record) for record in _records(data)]
    assert 2 <= len(logs) <= 1000  # the server refuses more
    inputs = {}
    for log in logs:
        assert log.WhichOneof("log_type") == "predict_log"
        request = log.predict_log.request
        assert request.model_spec.name == "tiny"
        assert request.model_spec.WhichOneof("version_choice") is None
        assert not log.predict_log.HasField("response")
        inputs.setdefault(request.model_spec.signature_name, []).append(dict(request.inputs))
    assert set(inputs) == {"token_ids", "serving_default"}
    for signature, key, dtype, rank in [("token_ids", "token_ids", 3, 2), ("serving_default", "text", 7, 1)]:
        for tensors in inputs[signature]:
            assert list(tensors) == [key]
            assert tensors[key].dtype == dtype  # DT_INT32, DT_STRING
            sizes = [d.size for d in tensors[key].tensor_shape.dim]
            assert len(sizes) == rank
            assert all(size > 0 for size in sizes)
    lengths = {tensors["token_ids"].tensor_shape.dim[1].size for tensors in inputs["token_ids"]}
    assert len(lengths) > 1 and max(lengths) <= MAX_LENGTH  # short and long requests


@pytest.mark.parametrize("text_signature", [True, False])
def test_what_is_written_is_read_back(tmp_path, text_signature):
    from serving.tensorflow_serving import read_warmup, write_warmup

    texts = [["fine"], ["好看 \U0001f600", "", "long " * 500]]
    token_ids = [np.array([[5]], np.int32), np.array([[1, 2, 3], [4, 0, 0]], np.int32)]
    write_warmup(tmp_path, "x", texts, token_ids, text_signature)
    records = read_warmup(tmp_path)
    assert [name for name, _ in records] == ["token_ids"] * 2 + ["serving_default"] * 2
    for (_, inputs), expected in zip(records[:2], token_ids, strict=True):
        assert inputs["token_ids"].dtype == np.int32
        np.testing.assert_array_equal(inputs["token_ids"], expected)
    for (_, inputs), batch, ids in zip(records[2:], texts, token_ids, strict=True):
        if text_signature:
            assert [text.decode() for text in inputs["text"]] == batch
        else:
            np.testing.assert_array_equal(inputs["token_ids"], ids)
