"""Keras layers of the encoder classifier; each can be used alone in another model.

Axes: B batch, T query positions, S key positions, N heads, H head size, D model size, F feed-forward size.

Masks are boolean, True = takes part. There are three, and they answer three questions:

padding  attend [B, 1, S]: is this key a token?       `padding_mask(token_ids != PAD_ID)`, in every model here.
causal   attend [1, T, S]: is this key not later than the query?  `causal_mask(T)`, for a decoder; `&` joins the two.
loss     counts [B, T]: is the answer at this position one to learn from?  `pipeline.batches.mask_tokens`, in
         pretraining: `pipeline.masked_tokens` computes logits where it is true only, and divides by their number.

The first two say what a position may see and act on attention's scores, in every layer; `attend` is the argument for
both. The third says what a position teaches and acts on the loss alone: a position that does not count is still seen
by those that do. Padding never counts, so what stands there reaches neither the loss nor a gradient.
`tests/pipeline/test_masks.py` has the three side by side.
"""

from pipeline.layers.attention import MultiHeadAttention, ScaledDotProductAttention
from pipeline.layers.chunked_attention import ChunkedAttention
from pipeline.layers.convolution import PreNormConvolution
from pipeline.layers.decoder import PreNormDecoderLayer
from pipeline.layers.encoder import PostNormEncoderLayer, PreNormEncoderLayer
from pipeline.layers.experts import MixtureOfExperts
from pipeline.layers.feed_forward import PositionwiseFeedForward
from pipeline.layers.linear_attention import LinearAttention
from pipeline.layers.local_attention import LocalAttention
from pipeline.layers.ngrams import NgramScores
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
    "MixtureOfExperts",
    "MultiHeadAttention",
    "NgramScores",
    "PositionwiseFeedForward",
    "PostNormEncoderLayer",
    "PreNormConvolution",
    "PreNormDecoderLayer",
    "PreNormEncoderLayer",
    "RotaryPosition",
    "ScaledDotProductAttention",
    "SinusoidalPosition",
]
