"""Attention over long texts in blocks of queries, so that its memory grows with the length and not with its square.

A loop of standard operators. Its body has the scores of one block of queries only; keys, values and mask are handed
from turn to turn as they are.
"""

import numpy as np
import onnx
from onnx import helper

from export.patterns import OneOf, Rule

BLOCK = 256  # queries in a block: products large enough to run at full speed, 256 S scores for each head

_FLOAT, _INT64, _BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL


def _replace(graph, match):
    length = graph.add("Shape", match["query"], start=2, end=3)  # [1]
    blocks = graph.add("Div", graph.add("Add", length, np.array([BLOCK - 1])), np.array([BLOCK]))
    missing = graph.add("Sub", graph.add("Mul", blocks, np.array([BLOCK])), length)
    pads = graph.add("Concat", np.zeros(6, np.int64), missing, np.zeros(1, np.int64), axis=0)
    query = graph.add("Pad", match["query"], pads)  # [B, N, blocks * BLOCK, H]
    turns = graph.add("Squeeze", blocks, np.array([0]))
    given = {"query": query, "key": match["key"], "value": match["value"]}
    given["masked"] = match["padding"] if "padding" in match else match["masked"]
    if "slopes" in match:
        given["slopes"] = match["slopes"]
    outputs = len(given) + 1
    *_, contexts = graph.add("Loop", turns, "", *given.values(), outputs=outputs, body=_body(list(given)))
    # [blocks, B, N, BLOCK, H]
    contexts = graph.add("Transpose", contexts, perm=[1, 2, 0, 3, 4])
    shape = graph.add("Concat", np.array([0, 0, -1]), graph.add("Shape", match["query"], start=3, end=4), axis=0)
    context = graph.add("Slice", graph.add("Reshape", contexts, shape), np.array([0]), length, np.array([2]))
    return graph.add("Mul", context, match["has_key"])


def _body(given):
    """The graph of one turn: (turn, go on, *given) -> (go on, *given, the contexts of one block of queries).

    Args:
        given: names of float values that stay the same: query, key, value, masked, and with ALiBi slopes.
    """
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in ("go_on", *given)]
    constants = {"block": np.array([BLOCK]), "axis": np.array([2])}

    def add(op_type, inputs, output, **attributes):
        nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output

    start = add("Mul", ["turn", "block"], "start")  # [1]
    end = add("Add", [start, "block"], "end")
    queries = add("Slice", ["query", start, end, "axis"], "queries")  # [B, N, BLOCK, H]
    scores = add("Add", [add("MatMul", [queries, "key"], "products"), "masked"], "scores")  # [B, N, BLOCK, S]
    if "slopes" in given:
        constants |= {"offsets": np.arange(BLOCK)[:, None], "zero": np.array(0), "one": np.array(1)}
        rows = add("Add", [start, "offsets"], "rows")  # [BLOCK, 1]
        count = add("Squeeze", [add("Shape", ["key"], "shape", start=3, end=4)], "count")
        distance = add("Sub", [rows, add("Range", ["zero", count, "one"], "columns")], "difference")  # [BLOCK, S]
        distance = add("Cast", [add("Abs", [distance], "absolute")], "distance", to=_FLOAT)
        scores = add("Add", [scores, add("Mul", ["slopes", distance], "bias")], "biased")
    add("MatMul", [add("Softmax", [scores], "weights", axis=-1), "value"], "context")
    inputs = [helper.make_tensor_value_info("turn", _INT64, []), helper.make_tensor_value_info("go_on", _BOOL, [])]
    inputs += [helper.make_tensor_value_info(name, _FLOAT, None) for name in given]
    outputs = [helper.make_tensor_value_info("go_on_out", _BOOL, [])]
    outputs += [helper.make_tensor_value_info(name, _FLOAT, None) for name in (*(f"{n}_out" for n in given), "context")]
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    return helper.make_graph(nodes, "block", inputs, outputs, initializers)


# layers/attention.py
_POSITIONS = ("Sub", ("Unsqueeze", "rows", [1]), ("Unsqueeze", "columns", [0]))
_ALIBI = ("Add", "padding", ("Mul", "slopes", ("Cast", ("Abs", _POSITIONS), {"to": _FLOAT})))
_SCORES = ("Add", ("MatMul", "query", "key"), OneOf(_ALIBI, "masked"))
IN_BLOCKS = Rule(("Mul", ("MatMul", ("Softmax", _SCORES), "value"), "has_key"), _replace)
