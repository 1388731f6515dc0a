"""What TensorFlow Serving needs beside the SavedModel: warm-up records.

Importing `tensorflow_serving.apis` imports all of TensorFlow.
"""

from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import model_pb2, predict_pb2, prediction_log_pb2

from pipeline.contract import SERVING_SIGNATURE, TEXT, TOKEN_IDS, TOKEN_IDS_SIGNATURE, WARMUP


def write_warmup(version_dir, name, texts, token_ids, text_signature):
    """Writes `assets.extra/tf_serving_warmup_requests`: one record per request, run by the server when it loads.

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
            writer.write(log.SerializeToString())


def read_warmup(version_dir):
    """Returns (signature, inputs) of every warm-up record, inputs being name -> NumPy array."""
    records = tf.data.TFRecordDataset([str(Path(version_dir) / WARMUP)])
    logs = [prediction_log_pb2.PredictionLog.FromString(record.numpy()) for record in records]
    requests = [log.predict_log.request for log in logs]
    return [(r.model_spec.signature_name, {k: tf.make_ndarray(v) for k, v in r.inputs.items()}) for r in requests]
