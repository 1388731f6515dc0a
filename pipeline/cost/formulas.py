"""What a model costs, in closed formulas of its sizes: parameters, multiply-adds, attention elements, memory.

TensorFlow is not imported: the answer is there at once, before there are data. Axes as everywhere: T positions, N
heads, H head size, D model size, F feed-forward size; and L layers, n positions in a batch, c bytes of a value in the
matrix products (4, or 2 in mixed precision).
"""

import math

from pipeline.config import CHUNKED_ABOVE, KEY_CHUNK
from pipeline.ngrams import slots_for

_FLOAT32 = 4  # bytes
# Of `pipeline.layers.dropout` on a CPU: a mask of up to this many values is a view of its rate's table, which has twice
# as many; a longer one is a tensor.
MASK_WINDOW = 1 << 23
NGRAMS = "n-grams at most"


def parameters(model, vocab_size, num_classes):
    """Returns how many trained values a model has, by part: {name: int}, parts without any left out.

    NGRAMS, fitted once training is done, are the part that no training step holds; of `model.ngram_pairs` pairs, though
    the texts may have fewer.

    Args:
        model: a `pipeline.config.ModelConfig`.
        vocab_size: number of token ids V.
        num_classes: number of classes C.
    """
    size, hidden, layers = model.d_model, model.d_ff, model.num_layers
    is_cls = model.pooling == "cls"
    inner = 2 if model.activation == "swiglu" else 1  # matrices D x F; and one F x D
    network = inner * (size * hidden + hidden) + hidden * size + size
    experts = model.num_experts
    parts = {
        "embedding": vocab_size * size,
        "convolution": model.convolution * size * size + size if model.convolution else 0,
        "positions": (model.max_length + is_cls) * size if model.position == "learned" else 0,
        "class vector": size if is_cls else 0,
        "attention": layers * (2 * (size * size + size) + 2 * (size * _key_size(model) + _key_size(model))),
        "feed-forward": layers * (experts * network + size * experts + experts if experts else network),
        "normalization": (2 * layers + 1 + (model.convolution > 0)) * 2 * size,
        "head": size * num_classes + num_classes,
    }
    of_encoders = {name: count * model.encoders for name, count in parts.items()}
    counts = {**of_encoders, NGRAMS: _ngrams(model, vocab_size, num_classes)}
    return {name: count for name, count in counts.items() if count}


def multiply_adds(model, length, num_classes):
    """Returns the multiply-adds of all matrix products for one text, forward, by part: {name: int}.

    Training takes three times as many, four with `training.recompute`: backward has two products for each. NGRAMS, a
    sum of 2 T rows, are there where the model has them; training does not compute them.

    Args:
        model: a `pipeline.config.ModelConfig`.
        length: tokens of the text.
        num_classes: number of classes C.
    """
    size, layers, positions = model.d_model, model.num_layers, _positions(model, length)
    matrices = (3 if model.activation == "swiglu" else 2) * _networks(model)
    if model.attention == "linear":
        # K'V, then Q' times it: H x H for each head and position, instead of a matrix of scores; and the divisor.
        attention = layers * positions * size * (2 * size // model.num_heads + 1)
    else:
        # Scores and contexts; each element of the matrices takes H multiply-adds, twice.
        attention = 2 * layers * _layer_elements(model, length) * (size // model.num_heads)
    parts = {
        "convolution": length * model.convolution * size * size,
        "projections": layers * positions * (2 * size * size + 2 * size * _key_size(model)),
        "attention": attention,
        "feed-forward": layers * positions * (matrices * size * model.d_ff + size * model.num_experts),
        "head": size * num_classes,
    }
    counts = {name: count * model.encoders for name, count in parts.items()}
    counts[NGRAMS] = 2 * length * num_classes if model.ngram_pairs else 0
    return {name: count for name, count in counts.items() if count}


def attention_elements(model, length):
    """Returns how many scores one text's attention has, of all encoders, layers and heads; full attention: L N T^2.

    Local attention compares blocks of `window` queries with three blocks of keys; local_global each query with the
    global tokens, too, and those with every token. Linear attention (Katharopoulos et al. 2020) has no scores.
    """
    return model.encoders * model.num_layers * _layer_elements(model, length)


def batch_rows(training, length):
    """Returns how many texts of `length` tokens are in a batch of `training.batch_tokens` and `batch_rows`."""
    count = max(1, training.batch_tokens // length)
    return min(count, training.batch_rows or count)


def activation_memory(model, training, length):
    """Returns the bytes that the forward pass of a training step keeps for the backward pass, by term: {name: int}.

    In one layer, n positions of a batch keep

    - normalization: of both norms the normalized values (float32) and what the next products take: 2 n D (4 + c);
    - heads: queries, keys, values and contexts, 4 n D c; keys and values are repeated for the queries' heads. Local
      attention has each block of keys and values three times, and the global ones once in each block; attention in
      chunks another context in float32; linear attention 7 n D float32 instead of queries, keys and values, whose
      features are sums of two terms;
    - attention weights: the softmax (float32) and, where dropout or a cast makes another tensor of it, what is
      multiplied with the values: N n S (4 + c), where a query has S keys; nothing in chunks, which are made again;
    - feed-forward: what the second product takes, n F c, and what the activation's gradient needs: GELU 2 n F float32
      (its graph keeps 3, of which TensorFlow's scheduler makes 1, the derivative, as early as it can: here 2), ReLU its
      output, SwiGLU gate, its sigmoid's product and hidden values; for each of top_k experts, with n D (4 + c) of
      inputs and outputs;
    - convolution: what its product takes, `width` vectors for each token, and GELU's derivative: n D (width c + 4);
    - dropout masks: float32, only of dropouts with more than MASK_WINDOW values.

    With `training.recompute` each layer keeps its input, and one layer at a time the rest.

    Args:
        model: a `pipeline.config.ModelConfig`.
        training: a `pipeline.config.TrainingConfig`.
        length: tokens of each text in the batch.
    """
    n, texts = _batch_positions(model, training, length), _passes(training, length)
    c = _compute_bytes(training)
    size, layers = model.d_model, model.num_layers
    weights = 0 if _is_chunked(model) else texts * _layer_elements(model, length)
    hidden = n * model.d_ff * _networks(model)
    another = model.dropout > 0 or c != _FLOAT32  # dropout or a cast makes a tensor of its own
    activated = {"gelu": 2, "relu": 1 if another else 0, "swiglu": 3}[model.activation]
    masks = [values for values in (weights, hidden, n * size, n * size) if values > MASK_WINDOW]
    layer = {
        "normalization": 2 * n * size * (_FLOAT32 + c),
        "heads": int(n * size * _head_bytes(model, length, c)),
        "attention weights": weights * (_FLOAT32 + (c if another else 0)),
        "feed-forward": hidden * (activated * _FLOAT32 + c) + n * size * (_FLOAT32 + c) * _experts(model),
        "dropout masks": _FLOAT32 * sum(masks) if model.dropout else 0,
    }
    encoders = model.encoders
    if training.recompute:
        kept = {"inputs of layers": encoders * layers * n * size * _FLOAT32, **layer}
    else:
        kept = {name: encoders * layers * bytes_ for name, bytes_ in layer.items()}
    if model.convolution:
        kept["convolution"] = encoders * n * size * (model.convolution * c + _FLOAT32)
    if model.pooling == "max":
        kept["pooling"] = encoders * n * size * _FLOAT32
    return {name: bytes_ for name, bytes_ in kept.items() if bytes_}


def step_memory(model, training, length, num_parameters):
    """Returns the bytes that a training step adds to what lies in memory between two steps, by term: {name: int}.

    `activation_memory`, all gradients in float32, and the workspace of one layer's backward pass: two float32 tensors
    (a gradient and what it is made into) of the largest kind, attention weights or hidden values; of attention in
    chunks four of a chunk's weights, and their dropout mask. Arguments as there.
    """
    hidden = 2 * _batch_positions(model, training, length) * model.d_ff * _networks(model)
    weights = _passes(training, length) * _layer_elements(model, length)
    if _is_chunked(model):
        weights = weights // _positions(model, length) * _chunk(model, length)
        attention = (5 if model.dropout and weights > MASK_WINDOW else 4) * weights
    else:
        attention = 2 * weights
    kept = activation_memory(model, training, length)
    workspace = max(hidden, attention) * _FLOAT32
    return {**kept, "backward workspace": workspace, "gradients": num_parameters * _FLOAT32}


def training_memory(model, training, length, num_parameters):
    """Returns the peak of a training step in bytes, by term: {name: int}; the program itself is not in it.

    `step_memory` and, between steps, weights, AdamW's two moments, sums of `accumulate_batches`, the average of
    `ema_decay`, and the tables (2 * MASK_WINDOW float32) that a CPU cuts the masks of each dropout rate from.
    """
    weights = num_parameters * _FLOAT32
    tables = len({model.dropout, model.head_dropout} - {0.0})
    held = {
        "weights": weights,
        "optimizer moments": 2 * weights,
        "gradient sums": weights if training.accumulate_batches > 1 else 0,
        "averaged weights": weights if training.ema_decay else 0,
        "dropout tables": tables * 2 * MASK_WINDOW * _FLOAT32,
    }
    held = {name: bytes_ for name, bytes_ in held.items() if bytes_}
    return {**held, **step_memory(model, training, length, num_parameters)}


def inference_memory(model, length, num_parameters):
    """Returns the peak of one text's forward pass in bytes, float32, weights included.

    Beside the residual stream one layer has, at a time, either queries, keys, values and two tensors of attention
    weights (scores and softmax) or the hidden values three times (of which the activation makes two).
    """
    n, size = _positions(model, length), model.d_model
    weights = _layer_elements(model, length)
    if _is_chunked(model):
        weights = weights // n * _chunk(model, length)
    attention = 3 * n * size + 2 * weights
    return _FLOAT32 * (num_parameters + 2 * n * size + max(attention, 3 * n * _networks(model) * model.d_ff))


def _ngrams(model, vocab_size, num_classes):
    if not model.ngram_pairs:
        return 0
    rows = vocab_size + model.ngram_pairs
    return slots_for(model.ngram_pairs) + rows * (num_classes + 1) + num_classes


def _layer_elements(model, length):
    """Returns how many scores one text has in one layer."""
    positions = _positions(model, length)
    if model.attention == "linear":
        return 0
    if model.attention == "full":
        return model.num_heads * positions * positions
    block, first = _block(model, length), _global_tokens(model)
    near = math.ceil(positions / block) * block * (3 * block + first)
    return model.num_heads * (near + first * positions)


def _head_bytes(model, length, c):
    """Returns the bytes of queries, keys, values and contexts for each of a position's D values."""
    if model.attention == "linear":
        return 7 * _FLOAT32 + c
    if model.attention == "full":
        return 4 * c + (_FLOAT32 if _is_chunked(model) else 0)
    return 2 * c + 2 * c * (3 + _global_tokens(model) / _block(model, length))


def _is_chunked(model):
    return model.attention == "full" and model.max_length > CHUNKED_ABOVE


def _chunk(model, length):
    """Returns how many keys are in a chunk: as many in all of them."""
    positions = _positions(model, length)
    return math.ceil(positions / math.ceil(positions / KEY_CHUNK))


def _block(model, length):
    """Returns how many queries are in a block of local attention."""
    return min(model.window, _positions(model, length))


def _global_tokens(model):
    return model.global_tokens if model.attention == "local_global" else 0


def _experts(model):
    """Returns how many experts compute a token, 0 without any."""
    return model.top_k if model.num_experts else 0


def _networks(model):
    """Returns how many feed-forward networks compute a token."""
    return _experts(model) or 1


def _key_size(model):
    """Returns the size of all heads of keys together."""
    return model.d_model // model.num_heads * (model.num_kv_heads or model.num_heads)


def _positions(model, length):
    """Returns T: the tokens, and the class vector in front of them."""
    return length + (model.pooling == "cls")


def _passes(training, length):
    """Returns how many texts of a batch go through the model at a time; R-Drop has each twice."""
    return batch_rows(training, length) * (2 if training.r_drop else 1)


def _batch_positions(model, training, length):
    return _passes(training, length) * _positions(model, length)


def _compute_bytes(training):
    return _FLOAT32 if training.precision == "float32" else 2
