"""What the layers ask of their inputs, as far as it is known when a graph is built; each check raises ValueError."""

import keras


def check_vectors(name, x):
    """Refuses what is no float [B, T, D]."""
    if len(x.shape) != 3 or not keras.backend.is_float_dtype(x.dtype):
        raise ValueError(f"{name} must be float [B, T, D]. Received: {_described(x)}")


def check_token_ids(token_ids, max_length=None):
    """Refuses what is no int [B, T] with T <= `max_length`, where there is one."""
    if len(token_ids.shape) != 2 or not keras.backend.is_int_dtype(token_ids.dtype):
        raise ValueError(f"token_ids must be int32 [B, T]. Received: {_described(token_ids)}")
    if max_length is not None:
        check_length(token_ids.shape[1], max_length)


def check_token_valid(token_valid, x):
    """Refuses what is no bool [B, T] that goes with `x` [B, T, D]."""
    check_vectors("x", x)
    fits = len(token_valid.shape) == 2 and _same(token_valid.shape[1], x.shape[1])
    if not fits or keras.backend.standardize_dtype(token_valid.dtype) != "bool":
        raise ValueError(
            f"token_valid must be boolean [B, T], True = real token, for x of shape {tuple(x.shape)}. "
            f"Received: {_described(token_valid)}"
        )


def check_heads(query, key, value):
    """Refuses what is no float [B, N, T, H], [B, N, S, H], [B, N, S, H]."""
    heads = (query, key, value)
    shapes = [tuple(x.shape) for x in heads]
    fits = all(len(s) == 4 for s in shapes) and len({s[-1] for s in shapes}) == 1
    fits = fits and len({s[1] for s in shapes}) == 1 and _same(shapes[1][2], shapes[2][2])
    if not fits or not all(keras.backend.is_float_dtype(x.dtype) for x in heads):
        raise ValueError(
            "query [B, N, T, H], key [B, N, S, H] and value [B, N, S, H] must be float, of rank 4, one number of heads "
            f"and one head size. Received: query={shapes[0]}, key={shapes[1]}, value={shapes[2]}, "
            f"dtypes={', '.join(keras.backend.standardize_dtype(x.dtype) for x in heads)}"
        )


def check_float(name, x):
    """Refuses what is not float."""
    if not keras.backend.is_float_dtype(x.dtype):
        raise ValueError(f"{name} must be float. Received: {_described(x)}")


def check_attend(attend, query, key):
    """Refuses what is no bool [B, 1 | T, S] for the heads `query` [B, N, T, H] and `key` [B, N, S, H]."""
    fits = len(attend.shape) == 3 and _same(attend.shape[2], key.shape[2])
    fits = fits and (attend.shape[0] == 1 or _same(attend.shape[0], query.shape[0]))
    if fits and attend.shape[1] != 1:
        fits = _same(attend.shape[1], query.shape[2])
    if not fits or keras.backend.standardize_dtype(attend.dtype) != "bool":
        raise ValueError(
            f"attend must be boolean [B | 1, 1 | T, S], True = may attend, for B={query.shape[0]}, "
            f"T={query.shape[2]}, S={key.shape[2]}. "
            f"Received: {_described(attend)}"
        )


def check_key_mask(attend, query, key):
    """Refuses a mask that is not the same for every query, bool [B, 1, S]; None is no mask."""
    if attend is None:
        return
    check_attend(attend, query, key)
    if attend.shape[1] != 1:
        raise ValueError(f"attend must be the same for every query: [B, 1, S]. Received: {_described(attend)}")


def check_length(length, max_length):
    """Refuses a length beyond the table; None is one that is not known yet."""
    if length is not None and length > max_length:
        raise ValueError(f"length must be <= max_length={max_length}. Received: length={length}")


def _same(size, other):
    return size is None or other is None or size == other


def _described(x):
    return f"shape={tuple(x.shape)}, dtype={keras.backend.standardize_dtype(x.dtype)}"
