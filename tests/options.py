"""Every option of the model, and what a classifier with it must answer: NumPy in float64, from the papers' formulas.

Nothing here uses the layers: weights are taken by the names of their paths.
"""

import math

import numpy as np

from pipeline.config import ModelConfig

SIZES = {"d_model": 16, "num_heads": 4, "d_ff": 24, "num_layers": 1, "max_length": 12}

# Each option alone, and many at once.
OPTIONS = {
    "reference": {"num_layers": 2},
    "learned": {"position": "learned"},
    "rope": {"position": "rope"},
    "alibi": {"position": "alibi"},
    "none": {"position": "none"},
    "max": {"pooling": "max"},
    "cls": {"pooling": "cls"},
    "post": {"norm": "post"},
    "relu": {"activation": "relu"},
    "swiglu": {"activation": "swiglu"},
    "grouped": {"num_kv_heads": 2},
    "multi_query": {"num_kv_heads": 1},
    "experts": {"num_experts": 4, "top_k": 2},
    "all_experts": {"num_experts": 2, "top_k": 2, "activation": "relu"},
    "local": {"attention": "local", "window": 3},
    "local_global": {"attention": "local_global", "window": 2, "global_tokens": 2},
    "local_alibi": {"attention": "local_global", "window": 3, "position": "alibi", "pooling": "cls"},
    "linear": {"attention": "linear"},
    "convolution": {"convolution": 3},
    "encoders": {"encoders": 3},
    "together": {
        "num_layers": 2,
        "position": "rope",
        "pooling": "cls",
        "norm": "post",
        "activation": "swiglu",
        "num_kv_heads": 2,
        "attention": "local_global",
        "window": 2,
        "num_experts": 3,
        "convolution": 5,
    },
}


# What no training step knows.
BESIDE = {"ngrams": {"ngram_pairs": 500}}


def config_of(name):
    """Returns the `ModelConfig` of an option."""
    return ModelConfig(**{**SIZES, **{**OPTIONS, **BESIDE}[name]})


def build(name, vocab_size, num_classes, **settings):
    """Returns a classifier with this option, untrained, none of whose weights is zero; imports TensorFlow here."""
    from pipeline.classifier import build_classifier

    model = build_classifier(config_of(name), vocab_size, num_classes, seed=5, **settings)
    rng = np.random.default_rng(0)
    for weight in model.trainable_weights:
        weight.assign(weight.numpy() + rng.normal(0, 0.1, weight.shape).astype(np.float32))
    return model


def build_fitted(name, vocab_size, num_classes):
    """Returns the `CalibratedClassifier` of `build`, whose fitted weights are neither 0 nor 1."""
    from pipeline.calibrated import CalibratedClassifier
    from pipeline.layers import NgramScores

    ngrams, pairs = None, config_of(name).ngram_pairs
    if pairs:
        ngrams = NgramScores.of(make_ngram_weights(vocab_size, num_classes, pairs), name="ngrams")
    model = CalibratedClassifier(build(name, vocab_size, num_classes), ngrams)
    model.temperature.assign(0.7)
    if pairs:
        model.ngram_weight.assign(1.5)
    return model


def make_ngram_weights(vocab_size, num_classes, pairs):
    """Returns random weights of a `NgramScores`, by name: half of the slots have a pair."""
    rng = np.random.default_rng(1)
    rows, slots = vocab_size + pairs, 2 * pairs
    table, squared_weights = rng.normal(0.0, 1.0, (rows, num_classes)), rng.uniform(0.1, 1.0, rows)
    table[0] = squared_weights[0] = 0.0
    slot = np.arange(slots)
    with_pad = np.arange(vocab_size) * 1_000_003 % slots  # a token and PAD are no pair
    free = rng.permutation(np.setdiff1d(slot, with_pad))[:pairs]
    pair_rows = np.zeros(slots, np.int32)
    pair_rows[free] = vocab_size + np.arange(len(free))
    rows = vocab_size + len(free)
    return {
        "pair_rows": pair_rows,
        "table": table[:rows].astype(np.float32),
        "squared_weights": squared_weights[:rows].astype(np.float32),
        "bias": rng.normal(0.0, 1.0, num_classes).astype(np.float32),
    }


def expected_ngram_scores(weights, token_ids):
    """Returns float64 [B, C]: what `NgramScores` must answer; each text is computed alone and without padding."""
    table, squared_weights, bias = (weights[k].astype(np.float64) for k in ("table", "squared_weights", "bias"))
    pair_rows, scores = weights["pair_rows"], []
    for row in token_ids:
        tokens = [int(token) for token in row if token]
        slots = [(a * 1_000_003 + b) % len(pair_rows) for a, b in zip(tokens[:-1], tokens[1:], strict=True)]
        rows = sorted({*tokens, *pair_rows[slots].tolist()} - {0})
        total, squares = table[rows].sum(axis=0), squared_weights[rows].sum()
        scores.append(bias + (total / math.sqrt(squares) if tokens else 0.0))
    return np.stack(scores)


def _weights_of(model):
    """Returns path below the model's name -> float64 array."""
    return {v.path.partition("/")[2]: v.numpy().astype(np.float64) for v in model.trainable_weights}


def make_ids(vocab_size, shapes=((1, 1), (2, 4), (5, 12), (3, 7)), seed=0):
    """Returns batches of token ids: full, short and empty rows."""
    rng = np.random.default_rng(seed)
    batches = []
    for rows, length in shapes:
        token_ids = rng.integers(1, vocab_size, (rows, length)).astype(np.int32)
        for row in range(1, rows):
            token_ids[row, rng.integers(1, length + 1) if row > 1 else 0 :] = 0
        batches.append(token_ids)
    return batches


def expected_logits(config, model, token_ids):
    """Returns float64 [B, C], the mean over encoders; each text is computed alone and without padding."""
    weights = [_weights_of(member) for member in model.members()]
    return np.stack([np.mean([_logits(config, w, row[row != 0]) for w in weights], axis=0) for row in token_ids])


def _logits(config, weights, tokens):
    w = weights
    x = w["embedding/embeddings"][tokens] * math.sqrt(config.d_model)  # [T, D]
    if config.convolution:
        x = x + _convolution(config, w, x)
    if config.pooling == "cls":
        x = np.concatenate([w["class_vector/class_vector"][None], x])
    if config.position == "sinusoidal":
        x = x + _sinusoids(len(x), config.d_model)
    elif config.position == "learned":
        x = x + w["position/position_table"][: len(x)]
    for i in range(config.num_layers):
        layer = {k.removeprefix(f"encoder_{i}/"): v for k, v in w.items() if k.startswith(f"encoder_{i}/")}
        x = _encoder_layer(config, layer, x)
    if config.pooling == "cls":
        pooled = x[0]
    elif not len(x):
        pooled = np.zeros(config.d_model)
    else:
        pooled = x.mean(axis=0) if config.pooling == "mean" else x.max(axis=0)
    pooled = _layer_norm(pooled, w["head_norm/gamma"], w["head_norm/beta"])
    return pooled @ w["head/kernel"] + w["head/bias"]


def _convolution(config, w, x):
    """What W does to each of the neighbours, by their distance."""
    kernel = w["convolution/projection/kernel"].reshape(config.convolution, config.d_model, config.d_model)
    normalized = _layer_norm(x, w["convolution/norm/gamma"], w["convolution/norm/beta"])
    total = np.tile(w["convolution/projection/bias"], (len(x), 1))
    for at in range(len(x)):
        for i, matrix in enumerate(kernel):
            neighbour = at + i - config.convolution // 2
            if 0 <= neighbour < len(x):
                total[at] += normalized[neighbour] @ matrix
    return _gelu(total)


def _encoder_layer(config, w, x):
    def norm(name, x):
        return _layer_norm(x, w[f"{name}/gamma"], w[f"{name}/beta"])

    if not len(x):
        return x
    if config.norm == "post":
        x = norm("attention_norm", x + _attention(config, w, x))
        return norm("feed_forward_norm", x + _feed_forward(config, w, x))
    x = x + _attention(config, w, norm("attention_norm", x))
    return x + _feed_forward(config, w, norm("feed_forward_norm", x))


def _attention(config, w, x):
    size = config.d_model // config.num_heads
    shared = config.num_heads // (config.num_kv_heads or config.num_heads)
    query, key, value = (_dense(w, f"attention/{name}", x) for name in ("query", "key", "value"))
    contexts = []
    for head in range(config.num_heads):
        q = query[:, head * size : (head + 1) * size]
        of_kv = slice(head // shared * size, (head // shared + 1) * size)
        k, v = key[:, of_kv], value[:, of_kv]
        if config.position == "rope":
            q, k = _rotated(q), _rotated(k)
        contexts.append(_head(config, head, q, k, v))
    return _dense(w, "attention/output", np.concatenate(contexts, axis=1))


def _head(config, head, q, k, v):
    length = len(q)
    distance = np.abs(np.arange(length)[:, None] - np.arange(length))
    if config.attention == "linear":
        features = [np.where(a > 0, a + 1, np.exp(np.minimum(a, 0))) for a in (q, k)]  # elu(x) + 1
        weights = features[0] @ features[1].T
        return weights / weights.sum(axis=1, keepdims=True) @ v
    scores = q @ k.T / math.sqrt(q.shape[1])
    if config.position == "alibi":
        # Of 2^n heads: 2^(-8 / 2^n), its square, and so on.
        scores = scores - distance * 2.0 ** (-8.0 / config.num_heads * (head + 1))
    if config.attention in ("local", "local_global"):
        may = distance <= config.window
        if config.attention == "local_global":
            may[: config.global_tokens] = may[:, : config.global_tokens] = True
        scores = np.where(may, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


def _rotated(x):
    half = x.shape[1] // 2
    turned = np.empty_like(x)
    for position in range(len(x)):
        for i in range(half):
            angle = position / 10000.0 ** (2 * i / x.shape[1])
            a, b = x[position, i], x[position, i + half]
            turned[position, i] = a * math.cos(angle) - b * math.sin(angle)
            turned[position, i + half] = a * math.sin(angle) + b * math.cos(angle)
    return turned


def _feed_forward(config, w, x):
    if not config.num_experts:
        return _network(config, w, x, "feed_forward")
    scores = _dense(w, "feed_forward/router", x)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    weights = p
    if config.top_k < config.num_experts:
        largest = -np.sort(-p, axis=1)[:, : config.top_k + 1]
        weights = np.maximum(p - largest[:, -1:], 0) / largest[:, :-1].sum(axis=1, keepdims=True)
    networks = [_network(config, w, x, f"feed_forward/expert_{i}") for i in range(config.num_experts)]
    return sum(weights[:, i : i + 1] * network for i, network in enumerate(networks))


def _network(config, w, x, name):
    hidden = _dense(w, f"{name}/hidden", x)
    if config.activation == "relu":
        hidden = np.maximum(hidden, 0)
    elif config.activation == "gelu":
        hidden = _gelu(hidden)
    else:
        gate = _dense(w, f"{name}/gate", x)
        hidden = gate / (1 + np.exp(-gate)) * hidden
    return _dense(w, f"{name}/output", hidden)


def _gelu(x):
    return x * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))), otypes=[float])(x)


def _dense(w, name, x):
    return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]


def _layer_norm(x, gamma, beta):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * gamma + beta


def _sinusoids(length, size):
    table = np.empty((length, size))
    for position in range(length):
        for i in range(0, size, 2):
            angle = position / 10000.0 ** (i / size)
            table[position, i], table[position, i + 1] = math.sin(angle), math.cos(angle)
    return table
