"""From the Keras model to a portable ONNX graph: token_ids -> logits, probabilities."""

import json

import onnx
import onnx.version_converter
import tensorflow as tf
import tf2onnx.optimizer
from tf2onnx import tf_loader, tfonnx

from export.fusion import fuse
from export.saved_model import classify_function
from pipeline.contract import LOGITS, PAD_ID, PROBABILITIES, TOKEN_IDS
from pipeline.errors import VerificationError

# tf2onnx 1.17 knows operator sets up to 18; onnx itself converts from there.
_TF2ONNX_OPSET = 18
_IR_VERSION = 9  # the first that goes with operator set 20
# `remove_back_to_back` writes wrong Reshapes for Dense layers; `global_pool_optimizer` turns LayerNorm's means into
# pooling operators that no runtime fuses; `optimize_transpose` moves the transposes of attention about, and makes them
# Reshapes where there is one head.
_LEFT_OUT_PASSES = {"remove_back_to_back", "global_pool_optimizer", "optimize_transpose"}


def convert(model, opset, metadata):
    """Converts a classifier to ONNX with standard operators only.

    The same weights give the same bytes, in any process. A token id outside the vocabulary makes the run fail on a CPU,
    and the logits of its text NaN on a GPU; see `export.fusion`.

    Args:
        model: a `CalibratedClassifier` in float32.
        opset: version of the standard operator set.
        metadata: key -> string, written to `metadata_props`.

    Returns:
        An `onnx.ModelProto`: token_ids int32 [batch, length] -> logits, probabilities float32 [batch, C].

    Raises:
        VerificationError: an operation has no ONNX form; names it.
    """
    in_one_piece = _in_one_piece(model)
    proto = _from_tensorflow(in_one_piece)
    proto = onnx.version_converter.convert_version(proto, opset)
    fuse(proto.graph, model.vocab_size, in_blocks=in_one_piece is not model)
    return _finish(proto, opset, metadata)


def _in_one_piece(model):
    """Returns the model, or a copy whose attention does not loop over chunks of keys: `fuse` writes its own loop."""
    return model.with_encoder(model.encoder.in_one_piece()) if model.is_chunked else model


def _from_tensorflow(model):
    function = classify_function(model).get_concrete_function()
    inputs = [t.name for t in function.inputs if t.dtype != tf.resource]
    outputs = {function.structured_outputs[name].name: name for name in (LOGITS, PROBABILITIES)}
    frozen = tf_loader.from_function(function, inputs, list(outputs))
    passes = {k: v for k, v in tf2onnx.optimizer._get_optimizers().items() if k not in _LEFT_OUT_PASSES}
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(frozen, name="")
        try:
            converted = tfonnx.process_tf_graph(
                graph,
                opset=_TF2ONNX_OPSET,
                input_names=inputs,
                output_names=list(outputs),
                tensors_to_rename={inputs[0]: TOKEN_IDS, **outputs},
                continue_on_error=False,
            )
        except ValueError as e:
            raise VerificationError(f"the model cannot be converted to ONNX: {e}") from e
        # Not tf2onnx.convert.from_function: it takes no choice of passes.
        converted = tf2onnx.optimizer.optimize_graph(converted, catch_errors=False, optimizers=passes)
        proto = converted.make_model("encoder_classifier")
    # What it has no rule for it only logs, and leaves in the graph as it was.
    foreign = sorted({node.op_type for node in proto.graph.node if not onnx.defs.has(node.op_type, node.domain)})
    if foreign:
        raise VerificationError(f"the model cannot be converted to ONNX: it has no operator for {', '.join(foreign)}")
    return proto


def make_metadata(name, version, labels, max_length, tokenizer_sha256):
    """Returns the `metadata_props` of every ONNX file of a version, as strings."""
    return {
        "name": name,
        "version": str(version),
        "labels": json.dumps(labels, ensure_ascii=False),
        "max_length": str(max_length),
        "pad_id": str(PAD_ID),
        "tokenizer_sha256": tokenizer_sha256,
    }


def _finish(proto, opset, metadata):
    proto.ir_version = _IR_VERSION
    del proto.opset_import[:]
    proto.opset_import.append(onnx.helper.make_opsetid("", opset))
    (token_ids,) = proto.graph.input
    for dimension, name in zip(token_ids.type.tensor_type.shape.dim, ("batch", "length"), strict=True):
        dimension.dim_param = name
    for output in proto.graph.output:
        output.type.tensor_type.shape.dim[0].dim_param = "batch"
    del proto.graph.value_info[:]  # shapes under tf2onnx's own dimension names
    onnx.helper.set_model_props(proto, metadata)
    onnx.checker.check_model(proto, full_check=True)
    return proto
