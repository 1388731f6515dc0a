"""Rewrites the converted graph into the operators that runtimes have fast kernels for.

tf2onnx writes every operation of TensorFlow by itself: LayerNorm as nine nodes, GELU as five, each Dense layer between
two Reshapes with the arithmetic of their shapes. The rules below put the standard operators in their place; the layers
that the patterns mirror are in `pipeline/layers/`.
"""

import numpy as np
import onnx

from export.blocks import IN_BLOCKS
from export.patterns import Graph, Named, OneOf, Rule
from pipeline.contract import LOGITS, ONNX_FILES, TOKEN_IDS
from pipeline.errors import VerificationError

_INT32, _INT64 = onnx.TensorProto.INT32, onnx.TensorProto.INT64
_FLOAT, _BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL


def fuse(graph_proto, vocab_size, in_blocks=False):
    """Rewrites an `onnx.GraphProto` of opset 20 that tf2onnx made, in place, with standard operators only.

    Args:
        graph_proto: the graph of a `CalibratedClassifier`. What no rule fits stays as it is.
        in_blocks: whether full attention is computed in blocks of queries, for long texts.
        vocab_size: number of token ids V. An id outside [0, V) makes the run fail on a CPU and the answer for its text
            NaN on a GPU.
    """
    graph = Graph(graph_proto)
    graph.rewrite(_FULL_SLICE, _DENSE, _LAYER_NORM, _GELU, _HEADS_LENGTH, _ATTENTION, _REPEAT, _MASK, _ANY, _POSITION)
    graph.rewrite(_NEIGHBOURS, _MOD, _CLIP, _SORTED)
    if in_blocks:
        graph.rewrite(IN_BLOCKS)
    graph.rewrite(_SQUEEZED, _embedding(vocab_size), _head(vocab_size))
    graph.write()


def count_operators(model):
    """Returns what `manifest.json` tells about an ONNX file, name -> count.

    `LayerNormalization`, `Gelu`, `Attention`: fused operators. `weight_products`: matrix products with a weight, of
    those `int8_products` in 8 bits. `activation_products`: matrix products of two activations. `nodes`: all operators.

    Args:
        model: an `onnx.ModelProto`.
    """
    bodies = [a.g for node in model.graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    nodes = [node for graph in (model.graph, *bodies) for node in graph.node]
    weights = {i.name for i in model.graph.initializer}
    products = [n for n in nodes if n.op_type in ("MatMul", "MatMulInteger", "Gemm")]
    weighted = [n for n in products if weights.intersection(n.input[:2])]
    return {
        "nodes": len(nodes),
        "LayerNormalization": sum(n.op_type == "LayerNormalization" for n in nodes),
        "Gelu": sum(n.op_type == "Gelu" for n in nodes),
        "Attention": sum(n.op_type == "Attention" for n in nodes),
        "weight_products": len(weighted),
        "int8_products": sum(n.op_type == "MatMulInteger" for n in weighted),
        "activation_products": len(products) - len(weighted),
    }


def expected_counts(precision, model):
    """Returns what `count_operators` must find in a file: name -> count.

    Args:
        precision: key of `ONNX_FILES`; the text graph counts as that of float32.
        model: a `pipeline.config.ModelConfig`.
    """
    layers, encoders = model.num_layers * model.encoders, model.encoders
    attentions = layers if precision == "ort" else 0
    # Queries, keys and values come from one product, or from three; of the operator Attention it is a part.
    projections = 1 if _is_packed(model) else 3
    networks = model.num_experts or 1
    feed_forward = networks * (3 if model.activation == "swiglu" else 2) + (1 if model.num_experts else 0)
    convolutions = encoders if model.convolution else 0
    products = layers * (projections + 1 + feed_forward) + convolutions + 1 - attentions
    return {
        "LayerNormalization": 2 * layers + convolutions + encoders,
        "Gelu": (layers * networks if model.activation == "gelu" else 0) + convolutions,
        "Attention": attentions,
        "weight_products": products,
        "int8_products": products if precision == "int8" else 0,
        "activation_products": _ACTIVATION_PRODUCTS[model.attention] * (layers - attentions),
    }


# Products of two activations in a layer: scores and contexts; of global tokens once more; of linear attention the sums
# of keys times values, those of keys, and what the queries make of both.
_ACTIVATION_PRODUCTS = {"full": 2, "local": 2, "local_global": 4, "linear": 3}


def _is_packed(model):
    return model.attention == "full" and model.position != "rope" and model.num_kv_heads in (0, model.num_heads)


def check_counts(precision, counts, model):
    """Compares the counts of a file with those of a `CalibratedClassifier` on which every rule fits.

    Args:
        precision: key of `ONNX_FILES`; the text graph counts as that of float32.
        counts: from `count_operators`.
        model: the `pipeline.config.ModelConfig`.

    Raises:
        VerificationError: an operator was not fused or not quantized; says which.
    """
    expected = expected_counts(precision, model)
    differ = [f"{name} {counts[name]} instead of {count}" for name, count in expected.items() if counts[name] != count]
    if differ:
        raise VerificationError(
            f"{ONNX_FILES[precision]} is not fused as the rules in export/ intend: {', '.join(differ)}. A layer was "
            "changed, or another version of TensorFlow, Keras or tf2onnx writes it differently: make the rules fit."
        )


# layers/dense.py: rows of the last axis through one product, then back into the shape they came from. A product of any
# rank needs no rows.


def _dense(graph, match):
    product = graph.add("MatMul", match["x"], match["kernel"])
    return graph.add("Add", product, match["bias"]) if "bias" in match else product


_ROWS = OneOf(("Reshape", "x", "rows_shape"), "x")  # x is in rows already when it has rank 2
_PRODUCT = ("MatMul", _ROWS, "kernel")
_LEADING = ("Slice", ("Cast", ("Shape", "x"), {"to": _INT32}), [0], [-1], [0])
_DENSE = Rule(
    (
        "Reshape",
        OneOf(("Add", _PRODUCT, "bias"), _PRODUCT),  # a bias of zeros is gone
        ("Cast", ("Concat", _LEADING, "units"), {"to": _INT64}),
    ),
    _dense,
)


# layers/normalization.py


def _layer_norm(graph, match):
    epsilon = float(graph.constants[match["epsilon"]])
    return graph.add(
        "LayerNormalization", match["x"], match["gamma"], match["beta"], axis=-1, epsilon=epsilon, stash_type=1
    )


_CENTRED = ("Sub", "x", ("ReduceMean", "x", [-1], {"keepdims": 1}))
_VARIANCE = ("ReduceMean", ("Mul", _CENTRED, _CENTRED), [-1], {"keepdims": 1})
_LAYER_NORM = Rule(
    ("Add", ("Mul", ("Div", _CENTRED, ("Sqrt", ("Add", _VARIANCE, "epsilon"))), "gamma"), "beta"),
    _layer_norm,
)


# layers/feed_forward.py

_GELU = Rule(
    ("Mul", "x", ("Add", 0.5, ("Mul", 0.5, ("Erf", ("Mul", "x", 0.5**0.5))))),
    lambda graph, match: graph.add("Gelu", match["x"], approximate="none"),
)


# layers/attention.py: one product makes queries, keys and values. The scale of the scores is folded into the queries.


def _attention(graph, match):
    kernels = [graph.constants[match[f"{name}_kernel"]] for name in ("query", "key", "value")]
    biases = [
        graph.constants[match[f"{name}_bias"]] if f"{name}_bias" in match else np.zeros(kernel.shape[1], kernel.dtype)
        for name, kernel in zip(("query", "key", "value"), kernels, strict=True)
    ]
    scale = graph.constants[match["scale"]] if "scale" in match else np.float32(1)  # heads of size 1 have none
    kernels[0], biases[0] = kernels[0] * scale, biases[0] * scale
    _, _, heads, size = graph.constants[match["heads_shape"]].tolist()
    packed = graph.add("MatMul", match["x"], np.concatenate(kernels, axis=1))
    packed = graph.add("Add", packed, np.concatenate(biases))  # [B, T, 3 D]
    packed = graph.add("Reshape", packed, np.array([0, 0, 3 * heads, size]))
    packed = graph.add("Transpose", packed, perm=[0, 2, 1, 3])  # [B, 3 N, T, H]
    query, key, value = graph.add("Split", packed, outputs=3, axis=1, num_outputs=3)  # [B, N, T, H] each
    scores = graph.add("MatMul", query, graph.add("Transpose", key, perm=[0, 1, 3, 2]))  # [B, N, T, S]
    weights = graph.add("Softmax", graph.add("Add", scores, match["masked"]), axis=-1)
    context = graph.add("Mul", graph.add("MatMul", weights, value), match["has_key"])
    context = graph.add("Transpose", context, perm=[0, 2, 1, 3])
    return graph.add("Reshape", context, np.array([0, 0, heads * size]))


def _swapped(x):
    return ("Transpose", x, {"perm": [0, 2, 1, 3]})


def _heads(name):
    product = ("MatMul", "x", f"{name}_kernel")
    return _swapped(("Reshape", OneOf(("Add", product, f"{name}_bias"), product), "heads_shape"))


_QUERY = OneOf(("Mul", _heads("query"), "scale"), _heads("query"))
_KEY = ("Transpose", _heads("key"), {"perm": [0, 1, 3, 2]})
_WEIGHTS = ("Softmax", ("Add", ("MatMul", _QUERY, _KEY), "masked"))
_CONTEXT = ("Mul", ("MatMul", _WEIGHTS, _heads("value")), "has_key")
_ATTENTION = Rule(("Reshape", _swapped(_CONTEXT), "joined_shape"), _attention)

# The number of positions, which positions and distances are made from: that of the layer's input. So the heads need not
# be there for it.
_HEADS_LENGTH = Rule(
    ("Slice", ("Cast", ("Shape", _heads("any")), {"to": _INT32}), [2], [3], [0]),
    lambda graph, match: graph.add("Cast", graph.add("Shape", match["x"], start=1, end=2), to=_INT32),
)


def _repeat(graph, match):
    (_, _, times, _, _), heads = graph.constants[match["times"]].tolist(), int(graph.constants[match["heads"]].item())
    return graph.add("Gather", match["x"], np.repeat(np.arange(heads // times, dtype=np.int32), times), axis=1)


# A head of keys or values for several of queries.
_TARGET = ("Cast", ("Concat", "batch", "heads", "rest"), {"to": _INT64})
_REPEAT = Rule(("Reshape", ("Tile", ("Unsqueeze", "x", [2]), "times"), _TARGET), _repeat)

# where(attend, 0, _MASKED), for which tf2onnx writes a sum of products: 0 * -inf were it in float16.
_MASK = Rule(
    ("Add", ("Mul", ("Cast", "attend"), 0.0), ("Mul", ("Cast", ("Not", "attend")), "masked")),
    lambda graph, match: graph.add("Where", match["attend"], np.float32(0), match["masked"]),
)

# any(attend), for which tf2onnx counts; attend is 0 or 1 here.
_AS_FLOAT = Named("x", ("Cast", "attend", {"to": _FLOAT}))
_ANY = Rule(
    ("Cast", ("Greater", ("ReduceSum", _AS_FLOAT, [-1], {"keepdims": 0}), 0.0), {"to": _FLOAT}),
    lambda graph, match: graph.add("ReduceMax", match["x"], np.array([-1]), keepdims=0),
)


def _full_slice(graph, match):
    starts, ends, steps = (graph.constants.get(match[name]) for name in ("starts", "ends", "steps"))
    if starts is None or ends is None or (starts != 0).any() or (ends < 10**9).any() or (steps != 1).any():
        return None
    return match["x"]


# A size that was read from a shape, and becomes part of another.
_SQUEEZED = Rule(("Unsqueeze", ("Squeeze", "x", [0]), [0]), lambda graph, match: match["x"])

# x[:, None], which also writes a slice that takes all of x.
_FULL_SLICE = Rule(("Slice", "x", "starts", "ends", "axes", "steps"), _full_slice)


# layers/position.py


def _position(graph, match):
    length = match.get("length") or graph.add("Shape", match["x"], start=1, end=2)
    return graph.add("Slice", match["table"], np.array([0]), length, np.array([0]))


_OF_HEADS = ("Cast", Named("length", ("Shape", "heads_input")))  # what _HEADS_LENGTH has put there
_LENGTH = ("Squeeze", OneOf(("Slice", ("Cast", ("Shape", "x")), [1], [2], [0]), _OF_HEADS), [0])
_POSITION = Rule(("Slice", "table", [0], ("Unsqueeze", _LENGTH, [0]), [0], [1]), _position)


# layers/convolution.py: slices of what was padded on both sides, each of the length that it had before.


def _neighbours(graph, match):
    pads, begins = (graph.constants.get(match[name]) for name in ("pads", "begins"))
    if begins is None or pads is None or pads.tolist() != [0, pads[1], 0, 0, pads[1], 0]:
        return None
    _, begin, _ = begins.tolist()
    end = begin - 2 * pads[1] or np.iinfo(np.int64).max
    return graph.add("Slice", match["padded"], np.array([begin]), np.array([end]), np.array([1]))


_NEIGHBOURS = Rule(("Slice", Named("padded", ("Pad", "x", "pads")), "begins", ("Add", "begins", "sizes")), _neighbours)


# layers/ngrams.py. tf2onnx writes the remainder as x - x / d * d.


def _mod(graph, match):
    divisor = graph.constants.get(match["divisor"])
    if divisor is None or divisor.dtype.kind != "i":
        return None
    return graph.add("Mod", match["x"], match["divisor"])


_MOD = Rule(("Sub", "x", ("Mul", ("Div", "x", "divisor"), "divisor")), _mod)


def _clip(graph, match):
    limits = [graph.constants.get(match[name]) for name in ("low", "high")]
    if any(limit is None or limit.ndim for limit in limits):
        return None
    return graph.add("Clip", match["x"], match["low"], match["high"])


_CLIP = Rule(("Max", ("Min", "x", "high"), "low"), _clip)


def _sorted(graph, match):
    length = graph.add("Shape", match["rows"], start=1, end=2)
    ordered, _ = graph.add("TopK", match["rows"], length, outputs=2, axis=-1, largest=1, sorted=1)
    return ordered


# Whole numbers as floats, from when ONNX Runtime sorted nothing else.
_SORTED = Rule(("Cast", ("TopK", ("Cast", "rows", {"to": _FLOAT}), "length"), {"to": _INT32}), _sorted)


# classifier.py and calibrated.py: embedding * sqrt(D), and the logits: the head's, with n-grams their scores added.
#
# Keras counts ids below 0 from the table's end, and so does ONNX Runtime. Here an id outside the vocabulary is looked
# up at V, which its CPU kernel refuses by name ("idx=V must be within the inclusive range [-V,V-1]"). Its CUDA kernel
# reads zeros there; so that no answer looks right, NaN is added to the logits of such a text. The n-grams look up the
# nearest id that there is.


def _is_known(graph, ids, vocab_size):
    return graph.add("Equal", graph.add("Clip", ids, np.int32(0), np.int32(vocab_size - 1)), ids)


def _embedding(vocab_size):
    def replace(graph, match):
        table = graph.constants[match["table"]] * graph.constants[match["scale"]]
        known = _is_known(graph, match["ids"], vocab_size)
        return graph.add("Gather", table, graph.add("Where", known, match["ids"], np.int32(vocab_size)), axis=0)

    below_0 = ("Less", ("Cast", "ids"), 0.0)
    from_the_end = ("Mul", ("Cast", below_0), ("Add", "ids", vocab_size))
    ids = ("Add", from_the_end, ("Mul", "ids", ("Cast", ("Not", below_0))))
    return Rule(("Mul", ("Gather", "table", ids), "scale"), replace)


def _head(vocab_size):
    def replace(graph, match):
        if match["logits"] != LOGITS:
            return None
        known = graph.add("Cast", _is_known(graph, TOKEN_IDS, vocab_size), to=_INT32)
        known = graph.add("Cast", graph.add("ReduceMin", known, np.array([1])), to=_BOOL)  # [B, 1]
        classes = graph.constants[match["kernel"]].shape[1]
        bias = match.get("bias", np.zeros(classes, np.float32))
        product = graph.add("MatMul", match["x"], match["kernel"])
        logits = graph.add("Add", product, graph.add("Where", known, bias, np.float32(np.nan)))
        return graph.add("Add", logits, match["scores"]) if "scores" in match else logits

    product = ("MatMul", "x", "kernel")
    # Of a head whose bias is zero and gone, the scores stand in its place.
    biased = ("Add", product, "bias")
    return Rule(Named("logits", OneOf(biased, product, ("Add", biased, "scores"))), replace)
