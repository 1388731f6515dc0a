"""int8 by dynamic quantization: weights in 8 bits, activations quantized as they come."""

import logging

import numpy as np
import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic

from export.patterns import Graph, Rule


def quantize_int8(source, target):
    """Writes the int8 form of an ONNX file, with the same inputs, outputs and metadata.

    Every product with a weight is quantized by output channel, and the tables of the embedding and of the n-grams by
    row; products of two activations (attention's scores and contexts) stay in float32.

    Args:
        source: path of the float32 file.
        target: path to write.
    """
    model = onnx.load(source)
    # The table is most of a small model's bytes. onnxruntime's own form has one scale for the whole table.
    graph = Graph(model.graph)
    graph.rewrite(Rule(("Gather", "table", "ids"), _gather_int8))
    graph.write()
    # It logs advice about pre-processing on the root logger at every call.
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    try:
        quantize_dynamic(
            model,
            target,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            # 7 bits of weight: with 8, CPUs without VNNI overflow int16 sums and answer differently.
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )
    finally:
        logging.getLogger().setLevel(level)
    quantized = onnx.load(target)
    onnx.helper.set_model_props(quantized, {p.key: p.value for p in model.metadata_props})  # without its own mark
    onnx.save(quantized, target)


def _gather_int8(graph, match):
    table = graph.constants.get(match["table"])  # [V, D]
    # Heads of keys or values, each taken several times; a number for each n-gram.
    if table is None or table.ndim != 2:
        return None
    scale = np.maximum(np.abs(table).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / np.float32(127)  # [V, 1]
    rows = graph.add("Gather", np.rint(table / scale).astype(np.int8), match["ids"], axis=0)
    rows = graph.add("Cast", rows, to=onnx.TensorProto.FLOAT)
    return graph.add("Mul", rows, graph.add("Gather", scale, match["ids"], axis=0))
