"""Warm-up records: requests that TensorFlow Serving runs when it loads a version, before it takes traffic.

A version whose records fail is refused, and the one before stays. Imports TensorFlow, since `tensorflow_serving.apis`
does.
"""

import re
from pathlib import Path

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow_serving.apis import model_pb2, predict_pb2, prediction_log_pb2

from pipeline.contract import PROBABILITIES, SERVING_SIGNATURE, TEXT, TOKEN_IDS, TOKEN_IDS_SIGNATURE, WARMUP
from pipeline.errors import VerificationError
from pipeline.text import pad
from serving.server_config import MAX_BATCH_ROWS

MAX_RECORDS = 1000  # kMaxNumRecords of TensorFlow Serving, which refuses a version with more
_SAMPLE = 1000  # texts whose lengths count


def warmup_batches(texts, tokenizer, max_length):
    """Chooses requests of every size that the server will meet, so that none is the first of its kind.

    Args:
        texts: real texts.
        tokenizer: the model's `Tokenizer`.
        max_length: longest text, in tokens.

    Returns:
        (texts, token_ids): lists of batches of 1 and of MAX_BATCH_ROWS rows; the text of a batch is a short one, one of
        median length, of the 95th percentile, and one of `max_length` tokens. A batch of texts is a list of str, one
        of ids int32 [B, T].
    """
    chosen = _texts_by_length(texts[:_SAMPLE], tokenizer, max_length)
    batches = [[text] * rows for rows in (1, MAX_BATCH_ROWS) for text in chosen]
    rows = dict(zip(chosen, tokenizer.encode(chosen, max_length), strict=True))
    return batches, [pad([rows[text] for text in batch]) for batch in batches]


def _texts_by_length(texts, tokenizer, max_length):
    counted = [(text, len(row)) for text, row in zip(texts, tokenizer.encode(texts), strict=True) if len(row)]
    texts, lengths = zip(*counted or [("a", 1)], strict=True)
    lengths = np.array(lengths)
    # The shortest of those that fill the model: one of a million characters would only make the file large.
    long_enough = [text for text, length in zip(texts, lengths, strict=True) if length >= max_length]
    longest = min(long_enough, key=len, default=texts[lengths.argmax()])
    while len(tokenizer.encode([longest])[0]) < max_length:
        longest = f"{longest} {longest}"
    lengths = np.minimum(lengths, max_length)
    wanted = [lengths.min(), np.median(lengths), np.percentile(lengths, 95)]
    # The fewest characters among those of the nearest length; short texts first, equal ones once.
    nearest = [min(zip(abs(lengths - length), map(len, texts), texts, strict=True))[2] for length in wanted]
    return list(dict.fromkeys([*nearest, longest]))


def write_warmup(version_dir, name, texts, token_ids, text_signature):
    """Writes `assets.extra/tf_serving_warmup_requests`, one record per request.

    Args:
        version_dir: directory of the SavedModel.
        name: the served model's name.
        texts: list of batches, each a list of strings, for `serving_default`; unused without `text_signature`.
        token_ids: list of int32 [B, T] arrays for the `token_ids` signature.
        text_signature: whether `serving_default` takes text; otherwise it takes token ids.
    """
    requests = [(TOKEN_IDS_SIGNATURE, TOKEN_IDS, batch) for batch in token_ids]
    if text_signature:
        requests += [(SERVING_SIGNATURE, TEXT, np.array([t.encode() for t in batch], object)) for batch in texts]
    else:
        requests += [(SERVING_SIGNATURE, TOKEN_IDS, batch) for batch in token_ids]
    path = Path(version_dir) / WARMUP
    path.parent.mkdir(parents=True, exist_ok=True)
    # The server reads an uncompressed TFRecord of PredictionLog and refuses anything else.
    with tf.io.TFRecordWriter(str(path)) as writer:
        for signature, key, batch in requests:
            request = predict_pb2.PredictRequest(
                model_spec=model_pb2.ModelSpec(name=name, signature_name=signature),
                inputs={key: tf.make_tensor_proto(batch)},
            )
            log = prediction_log_pb2.PredictionLog(predict_log=prediction_log_pb2.PredictLog(request=request))
            writer.write(log.SerializeToString(deterministic=True))


def read_warmup(version_dir):
    """Returns (signature, inputs) of every warm-up record, inputs being name -> NumPy array.

    Raises:
        VerificationError: the file is none that the server reads; says which record.
    """
    return [
        (request.model_spec.signature_name, {key: tf.make_ndarray(value) for key, value in request.inputs.items()})
        for request in _read_requests(version_dir)
    ]


def _read_requests(version_dir):
    requests = []
    try:
        for record in tf.data.TFRecordDataset([str(Path(version_dir) / WARMUP)]):
            log = prediction_log_pb2.PredictionLog.FromString(record.numpy())
            if log.WhichOneof("log_type") != "predict_log":
                raise VerificationError(f"{WARMUP} record {len(requests)} is no PredictionLog with a predict_log")
            requests.append(log.predict_log.request)
    except DecodeError as e:
        raise VerificationError(f"{WARMUP} record {len(requests)} is no PredictionLog") from e
    except tf.errors.OpError as e:
        raise VerificationError(f"{WARMUP} is no uncompressed TFRecord file: {_reason(e)}") from e
    return requests


def check_warmup(version_dir, name, signatures):
    """Does with the warm-up file of a version what the server will do, and returns how many records it holds.

    Args:
        version_dir: the version's directory.
        name: the served model's name.
        signatures: those of the SavedModel, as `tf.saved_model.load` gives them.

    Raises:
        VerificationError: a record does not fit its signature or cannot be run, or a signature has none; says which.
    """
    requests = _read_requests(version_dir)
    if not 1 <= len(requests) < MAX_RECORDS:
        raise VerificationError(f"{WARMUP} must hold 1 to {MAX_RECORDS - 1} records. Received: {len(requests)}")
    for i, request in enumerate(requests):
        try:
            _run(request, name, signatures)
        except VerificationError as e:
            raise VerificationError(f"{WARMUP} record {i}: {e}") from e
        except tf.errors.OpError as e:
            raise VerificationError(f"{WARMUP} record {i} cannot be run: {_reason(e)}") from e
    cold = set(signatures) - {request.model_spec.signature_name for request in requests}
    if cold:
        raise VerificationError(f"{WARMUP} has no record for the signature {', '.join(sorted(cold))}")
    return len(requests)


def _run(request, name, signatures):
    spec = request.model_spec
    if spec.name != name or spec.WhichOneof("version_choice") is not None:
        raise VerificationError(f"it must ask for {name}, without a version. Received: {' '.join(str(spec).split())}")
    if spec.signature_name not in signatures:
        raise VerificationError(f"the SavedModel has no signature {spec.signature_name!r}")
    signature = signatures[spec.signature_name]
    _, expected = signature.structured_input_signature  # name -> TensorSpec
    if set(request.inputs) != set(expected):
        raise VerificationError(f"its inputs are {sorted(request.inputs)} instead of {sorted(expected)}")
    for key, tensor in request.inputs.items():
        dtype, shape = tf.as_dtype(tensor.dtype), [d.size for d in tensor.tensor_shape.dim]
        if dtype != expected[key].dtype or len(shape) != expected[key].shape.rank or 0 in shape:
            spec = expected[key]
            raise VerificationError(f"{key} is {dtype.name} {shape} instead of {spec.dtype.name} {list(spec.shape)}")
        if shape[0] > MAX_BATCH_ROWS:
            raise VerificationError(f"{key} has {shape[0]} rows; the server runs up to {MAX_BATCH_ROWS} at once")
    answer = signature(**{key: tf.constant(tf.make_ndarray(value)) for key, value in request.inputs.items()})
    if not np.isfinite(answer[PROBABILITIES]).all():
        raise VerificationError("the answer is not finite")


def _reason(error):
    """What TensorFlow says, in one line, without the names of graph nodes around it."""
    message = re.sub(r"\{\{.*?\}\}|\[Op:.*", "", " ".join(error.message.split()))
    return message.strip()[:300]
