"""float16 for GPUs: half the bytes, and matrix products on tensor cores."""

import onnx
from onnxruntime.transformers.float16 import convert_float_to_float16

from export.patterns import Graph, Rule

_FLOAT, _FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16

# What float32 values are clamped to: the mask's -1e30 would become -inf, and a text without tokens NaN. Beside a real
# score, -1e4 still has weight 0.
_LARGEST = 1e4
# Sums over all tokens, which leave the range of float16 or lose their last bits; and that over experts, for which
# ONNX Runtime has no float16 kernel on a CPU.
_FLOAT32_OPERATORS = ["ReduceSum", "Max", "Div", "Sqrt", "ScatterND"]


def convert_float16(source, target):
    """Writes the float16 form of an ONNX file: the same inputs and metadata, the outputs in float32.

    The encoder is in float16; onnxruntime's kernels sum LayerNormalization and Softmax in float32 there too. Sums over
    tokens and the head, which take no time, are in float32, and so are the n-grams but for their table. On a CPU it is
    slower than the float32 file.

    Args:
        source: path of the float32 file.
        target: path to write.
    """
    model = onnx.load(source)
    model = convert_float_to_float16(
        model,
        max_finite_val=_LARGEST,
        keep_io_types=True,
        op_block_list=_FLOAT32_OPERATORS,
        node_block_list=_head(model.graph) + _weights_of_ngrams(model.graph),
    )
    values = [*onnx.shape_inference.infer_shapes(model).graph.value_info, *model.graph.output]
    in_float32 = {v.name for v in values if v.type.tensor_type.elem_type == _FLOAT}

    def unrounded(graph, match):
        return match["x"] if match["x"] in in_float32 else None

    # It rounds to float16 between any two operators that are to stay in float32.
    rounded = ("Cast", ("Cast", "x", {"to": _FLOAT16}), {"to": _FLOAT})
    graph = Graph(model.graph)
    graph.rewrite(Rule(rounded, unrounded))
    graph.write()
    del model.graph.value_info[:]
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, target)


def _head(graph):
    """Names of the last LayerNormalization, the n-grams' root and what follows them, and of the last bias's Where."""
    norms = [node for node in graph.node if node.op_type == "LayerNormalization"]
    head = [norms[-1], *(node for node in graph.node if node.op_type == "Sqrt")]
    values = {output for node in head for output in node.output}
    for node in graph.node:
        if values.intersection(node.input):
            values.update(node.output)
            head.append(node)
    inputs = {name for node in head for name in node.input}
    head += [node for node in graph.node if node.op_type == "Where" and inputs.intersection(node.output)]
    return [node.name for node in head]


def _weights_of_ngrams(graph):
    """Names of the Gather that reads the n-grams' squared weights: a vector, of which a table's rows are none."""
    vectors = {i.name for i in graph.initializer if len(i.dims) == 1}
    return [node.name for node in graph.node if node.op_type == "Gather" and node.input[0] in vectors]
