"""The form for ONNX Runtime alone: its own attention operator in the place of the standard ones."""

import numpy as np
import onnx

from export.patterns import Graph, Rule

DOMAIN = "com.microsoft"
_INT32 = onnx.TensorProto.INT32


def convert_ort(source, target):
    """Writes the form of an ONNX file that only ONNX Runtime can run, with the same inputs, outputs and metadata.

    Its operator `Attention` (com.microsoft, version 1) has kernels for CPU and CUDA. It takes the product that makes
    queries, keys and values in as well.

    Args:
        source: path of the float32 file.
        target: path to write.
    """
    model = onnx.load(source)
    graph = Graph(model.graph)
    graph.rewrite(_ATTENTION)
    graph.write()
    model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, target)


def _attention(graph, match):
    kernel, bias = graph.constants[match["kernel"]], graph.constants[match["bias"]]  # [D, 3 D], [3 D]
    heads = int(graph.constants[match["heads_shape"]][2]) // 3
    token_valid = graph.add("Cast", match["token_valid"], to=_INT32)
    context = graph.add(
        "Attention",
        match["x"],
        kernel,
        bias,
        token_valid,
        domain=DOMAIN,
        num_heads=heads,
        scale=1.0,  # it is in the queries' kernel
        mask_filter_value=-1e30,  # in the place of a padded key's score, as in layers/attention.py
    )
    # Without any key it takes the mean of all.
    return graph.add("Mul", context, graph.add("Squeeze", match["has_key"], np.array([1])))


# What export/fusion.py makes of layers/attention.py. The three of the Split are the queries, keys and values in order.
_PACKED = ("Reshape", ("Add", ("MatMul", "x", "kernel"), "bias"), "heads_shape")
_ONE_OF_THREE = ("Split", ("Transpose", _PACKED, {"perm": [0, 2, 1, 3]}))
_SCORES = ("MatMul", _ONE_OF_THREE, ("Transpose", _ONE_OF_THREE, {"perm": [0, 1, 3, 2]}))
_MASKED = ("Unsqueeze", ("Where", ("Unsqueeze", "token_valid", [1]), 0.0, "fill"), [1])
_CONTEXT = ("Mul", ("MatMul", ("Softmax", ("Add", _SCORES, _MASKED)), _ONE_OF_THREE), "has_key")
_ATTENTION = Rule(("Reshape", ("Transpose", _CONTEXT, {"perm": [0, 2, 1, 3]}), "joined_shape"), _attention)
