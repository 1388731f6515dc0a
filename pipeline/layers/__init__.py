"""Keras layers of the encoder classifier; each can be used alone in another model.

Masks are boolean and True = real: `token_valid [B, T]` marks real tokens, `attend [B, 1 | T, S]` says which
keys a query may attend to. Axes: B batch, T query positions, S key positions, N heads, H head size, D model
size, F feed-forward size.
"""

from pipeline.layers.attention import MultiHeadAttention, ScaledDotProductAttention
from pipeline.layers.chunked_attention import ChunkedAttention
from pipeline.layers.encoder import PostNormEncoderLayer, PreNormEncoderLayer
from pipeline.layers.feed_forward import PositionwiseFeedForward
from pipeline.layers.linear_attention import LinearAttention
from pipeline.layers.local_attention import LocalAttention
from pipeline.layers.pooling import ClassVector, FirstPooling, MaskedMaxPooling, MaskedMeanPooling
from pipeline.layers.position import LearnedPosition, RotaryPosition, SinusoidalPosition

__all__ = [
    "ChunkedAttention",
    "ClassVector",
    "FirstPooling",
    "LearnedPosition",
    "LinearAttention",
    "LocalAttention",
    "MaskedMaxPooling",
    "MaskedMeanPooling",
    "MultiHeadAttention",
    "PositionwiseFeedForward",
    "PostNormEncoderLayer",
    "PreNormEncoderLayer",
    "RotaryPosition",
    "ScaledDotProductAttention",
    "SinusoidalPosition",
]
