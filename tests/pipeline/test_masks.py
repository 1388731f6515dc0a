"""The three masks side by side, on one text of three tokens and a place of padding; see `pipeline.layers`."""

import math
import types

import keras
import numpy as np
import pytest

from pipeline.contract import PAD_ID
from pipeline.layers import ScaledDotProductAttention
from pipeline.layers.attention import causal_mask, padding_mask
from pipeline.masked_tokens import MaskedTokenModel, MaskedTokenStep, compile_measure

TOKEN_IDS = np.array([[5, 6, 7, PAD_ID]], np.int32)

# Who may look at whom: rows are queries, columns keys. True = takes part, as everywhere.
PADDING = [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
CAUSAL = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
BOTH = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]


def attended(attend):
    """The attention weights where all scores are equal: each query's share of each key, [T, S]."""
    query, value = np.zeros((1, 1, 4, 2), np.float32), np.zeros((1, 1, 4, 2), np.float32)
    _, weights = ScaledDotProductAttention()(query, query, value, attend=attend, return_weights=True)
    return weights[0, 0]


@pytest.mark.parametrize(
    ("attend", "expected"),
    [
        (padding_mask(TOKEN_IDS != PAD_ID), PADDING),
        (causal_mask(4), CAUSAL),
        (padding_mask(TOKEN_IDS != PAD_ID) & causal_mask(4), BOTH),
    ],
    ids=["padding", "causal", "both"],
)
def test_the_masks_of_attention_say_what_a_query_sees(attend, expected):
    seen = np.array(expected, np.float32)
    np.testing.assert_array_equal(np.broadcast_to(attend, (1, 4, 4))[0], seen > 0)
    np.testing.assert_allclose(attended(attend), seen / seen.sum(axis=1, keepdims=True), atol=1e-7, rtol=0)


class Encoder(types.SimpleNamespace):
    """Gives every position the vector (1, -1); its three pieces have the logits 0, ln 2 and ln 5 there."""

    d_model = 2

    def __init__(self):
        layer = keras.layers.Identity()
        table = keras.layers.Embedding(3, 2)
        table.build()
        table.embeddings.assign([[0, 0], [math.log(2) / 2, -math.log(2) / 2], [math.log(5) / 2, -math.log(5) / 2]])
        super().__init__(head=layer, head_norm=layer, embedding=table)

    def encode(self, token_ids, training):
        return np.array([1.0, -1.0], np.float32) * np.ones((*token_ids.shape, 1), np.float32)


def test_the_loss_mask_says_what_a_position_teaches():
    # The softmax of (0, ln 2, ln 5) is 1/8, 2/8, 5/8. Only the second place counts, and the third of another mask.
    model = MaskedTokenModel(Encoder())
    targets = np.array([[0, 2, 1, PAD_ID]], np.int32)
    counts = np.array([[False, True, False, False]])
    logits = model(targets, counts)
    np.testing.assert_allclose(logits, [[0.0, math.log(2), math.log(5)]], atol=2e-5, rtol=0)  # LayerNorm's epsilon

    def measure(counts):
        return [float(x) for x in compile_measure_eagerly(model)(targets, np.array([counts]))]

    assert measure([False, True, False, False]) == pytest.approx([math.log(8 / 5), 1], abs=2e-5)
    assert measure([False, False, True, False]) == pytest.approx([math.log(8 / 2), 0], abs=2e-5)
    assert measure([False, True, True, False]) == pytest.approx([math.log(8 / 5) + math.log(8 / 2), 1], abs=4e-5)
    assert measure([False] * 4) == [0, 0]


def compile_measure_eagerly(model):
    measure = compile_measure(model).python_function
    return lambda targets, counts: measure(targets, targets, counts)


def test_the_loss_is_divided_by_the_positions_that_count():
    assert MaskedTokenStep._weight(None, None, None, np.array([[True, False], [True, True]])) == 3
