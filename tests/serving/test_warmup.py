"""Warm-up records as TensorFlow Serving reads them: an uncompressed TFRecord of PredictionLog."""

import gzip
import struct

import numpy as np
import pytest

from pipeline.errors import VerificationError
from serving.server_config import MAX_BATCH_ROWS
from tests.jobs import MAX_LENGTH, published_job
from tests.serving.tiny import Tiny

pytestmark = pytest.mark.slow

FILE = "assets.extra/tf_serving_warmup_requests"


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

    from pipeline.text import Tokenizer

    tokenizer = Tokenizer.load(job.model_dir / "1" / "tokenizer.model")
    data = (job.model_dir / "1" / FILE).read_bytes()
    logs = [prediction_log_pb2.PredictionLog.FromString(record) for record in _records(data)]
    assert len(data) < 100_000
    sizes = {"token_ids": set(), "serving_default": set()}  # (rows, tokens)
    for log in logs:
        assert log.WhichOneof("log_type") == "predict_log"
        request = log.predict_log.request
        assert request.model_spec.name == "tiny"
        assert request.model_spec.WhichOneof("version_choice") is None
        assert not log.predict_log.HasField("response")
        ((key, tensor),) = request.inputs.items()
        shape = [d.size for d in tensor.tensor_shape.dim]
        if request.model_spec.signature_name == "token_ids":
            assert (key, tensor.dtype, len(shape)) == ("token_ids", 3, 2)  # DT_INT32
        else:
            assert (key, tensor.dtype, len(shape)) == ("text", 7, 1)  # DT_STRING
            texts = [text.decode() for text in tensor.string_val]
            shape.append(max(map(len, tokenizer.encode(texts, MAX_LENGTH))))
        sizes[request.model_spec.signature_name].add(tuple(shape))
    lengths = sorted({length for _, length in sizes["token_ids"]})
    assert 2 <= len(lengths) <= 4 and lengths[0] < lengths[-1] == MAX_LENGTH
    for found in sizes.values():
        assert found == {(rows, length) for rows in (1, MAX_BATCH_ROWS) for length in lengths}


def test_lengths_are_those_of_real_texts():
    from serving.warmup import warmup_batches

    tokenizer = Tiny.build().tokenizer
    texts = ["good film " * count for count in range(100)] + ["", "  ", "\u200b"]  # the empty ones do not count
    ordered = sorted(len(row) for row in tokenizer.encode(texts) if len(row))
    max_length = ordered[-2]
    batches, token_ids = warmup_batches(texts, tokenizer, max_length)
    lengths = [ids.shape for ids in token_ids]
    assert [len(batch) for batch in batches] == [1] * 4 + [MAX_BATCH_ROWS] * 4 == [rows for rows, _ in lengths]
    for i, expected in enumerate([ordered[0], ordered[49], np.percentile(ordered, 95), max_length]):
        assert lengths[i][1] == lengths[i + 4][1] == pytest.approx(expected, abs=1)
    assert batches[3] == [texts[98]]  # long enough, and no longer
    for batch, ids in zip(batches, token_ids, strict=True):
        np.testing.assert_array_equal(ids[0], tokenizer.encode(batch[:1], max_length)[0])
        assert (ids == ids[0]).all() and ids.dtype == np.int32
    for few in ([], ["", "\u200b"], ["good"]):  # nothing fills the model
        assert {ids.shape[1] for ids in warmup_batches(few, tokenizer, 300)[1]} >= {1, 300}


@pytest.mark.parametrize("text_signature", [True, False])
def test_what_is_written_is_read_back(tmp_path, text_signature):
    from serving.warmup import read_warmup, write_warmup

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


@pytest.fixture(scope="module")
def signatures(job):
    import tensorflow as tf
    import tensorflow_text  # noqa: F401 - registers operations

    loaded = tf.saved_model.load(str(job.model_dir / "1"))
    return loaded.signatures


def _request(signature="token_ids", key="token_ids", value=((5, 6),), dtype="int32", name="tiny"):
    import tensorflow as tf
    from tensorflow_serving.apis import model_pb2, predict_pb2

    spec = model_pb2.ModelSpec(name=name, signature_name=signature)
    return predict_pb2.PredictRequest(model_spec=spec, inputs={key: tf.make_tensor_proto(value, dtype)})


def _write(directory, requests, wrap=True):
    import tensorflow as tf
    from tensorflow_serving.apis import prediction_log_pb2

    (directory / FILE).parent.mkdir()
    with tf.io.TFRecordWriter(str(directory / FILE)) as writer:
        for request in requests:
            log = prediction_log_pb2.PredictionLog(predict_log=prediction_log_pb2.PredictLog(request=request))
            writer.write((log if wrap else request).SerializeToString())


def _good():
    return [_request(), _request("serving_default", "text", ["good"], "string")]


def test_good_records_pass(signatures, tmp_path):
    from serving.warmup import check_warmup

    _write(tmp_path, _good())
    assert check_warmup(tmp_path, "tiny", signatures) == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"signature": "predict"}, "record 2: the SavedModel has no signature 'predict'"),
        ({"key": "ids"}, r"record 2: its inputs are \['ids'\] instead of \['token_ids'\]"),
        ({"dtype": "int64"}, r"record 2: token_ids is int64 \[1, 2\] instead of int32 \[None, None\]"),
        ({"value": (5, 6)}, r"token_ids is int32 \[2\] instead of"),
        ({"value": ((),)}, r"token_ids is int32 \[1, 0\] instead of"),
        ({"value": ((5,),) * (MAX_BATCH_ROWS + 1)}, "token_ids has 33 rows; the server runs up to 32"),
        ({"value": ((-1,),)}, "record 2 cannot be run: .*the vocabulary"),
        ({"name": "other"}, "record 2: it must ask for tiny, without a version"),
    ],
)
def test_bad_record_is_refused(signatures, tmp_path, bad, message):
    from serving.warmup import check_warmup

    _write(tmp_path, [*_good(), _request(**bad)])
    with pytest.raises(VerificationError, match=message) as caught:
        check_warmup(tmp_path, "tiny", signatures)
    assert "\n" not in str(caught.value)


def test_record_of_a_version_is_refused(signatures, tmp_path):
    from serving.warmup import check_warmup

    request = _request()
    request.model_spec.version.value = 1
    _write(tmp_path, [request])
    with pytest.raises(VerificationError, match="record 0: it must ask for tiny, without a version"):
        check_warmup(tmp_path, "tiny", signatures)


def test_file_of_another_kind_is_refused(signatures, tmp_path):
    from serving.warmup import check_warmup

    for name, message in [
        ("bare", "record 0 is no PredictionLog"),
        ("gzip", "is no uncompressed TFRecord file: corrupted record"),
        ("cut", "is no uncompressed TFRecord file"),
        ("none", "is no uncompressed TFRecord file: .*No such file"),
        ("empty", "must hold 1 to 999 records. Received: 0"),
        ("many", "must hold 1 to 999 records. Received: 1000"),
        ("cold", "has no record for the signature serving_default"),
    ]:
        directory = tmp_path / name
        directory.mkdir()
        requests = {"empty": [], "many": [_request()] * 1000, "cold": [_request()]}.get(name, _good())
        _write(directory, requests, wrap=name != "bare")
        data = (directory / FILE).read_bytes()
        if name == "gzip":
            (directory / FILE).write_bytes(gzip.compress(data))
        elif name == "cut":
            (directory / FILE).write_bytes(data[:-3])
        elif name == "none":
            (directory / FILE).unlink()
        with pytest.raises(VerificationError, match=message):
            check_warmup(directory, "tiny", signatures)
