"""A tiny complete version directory, made without TensorFlow, and what it must answer, in NumPy."""

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser

from pipeline import contract
from pipeline.text import Tokenizer, train_tokenizer

LABELS = ["bad", "good", "很好 \U0001f600"]
MAX_LENGTH = 12
VOCAB_SIZE = 400

# Every text a tokenizer may stumble over; several are longer than MAX_LENGTH tokens.
TEXTS = [
    "the film was good",
    "",
    "   ",
    "这部电影非常好看",
    "a great story \U0001f600\U0001f469‍\U0001f4bb and terrible acting",
    "boring boring boring boring boring boring boring boring boring boring boring boring boring good",
    "xylophone quark 龘靐",
    "  two\tspaces\u3000and\nlines \r\n",
    "é naïve ﬁ ½",
]

# Mean over the real tokens of their embeddings, then a linear layer.
_IDS_GRAPH = """
<ir_version: 10, opset_import: ["": 20]>
classifier (int32[batch, length] token_ids) => (float[batch, classes] logits, float[batch, classes] probabilities)
<int32 pad = {0}, int64[1] axis_1 = {1}, int64[1] last_axis = {-1}, float one = {1.0}>
{
    is_pad = Equal (token_ids, pad)
    token_valid = Not (is_pad)
    weights = Cast <to = 1> (token_valid)
    weights_column = Unsqueeze (weights, last_axis)
    embedded = Gather (embedding, token_ids)
    masked = Mul (embedded, weights_column)
    total = ReduceSum <keepdims = 0> (masked, axis_1)
    count = ReduceSum <keepdims = 1> (weights, axis_1)
    count_or_one = Max (count, one)
    mean = Div (total, count_or_one)
    projected = MatMul (mean, kernel)
    logits = Add (projected, bias)
    probabilities = Softmax <axis = -1> (logits)
}
"""


def train_tiny_tokenizer():
    """Returns the bytes of a SentencePiece model with `VOCAB_SIZE` pieces."""
    rng = random.Random(0)
    words = ["the", "film", "was", "good", "bad", "great", "terrible", "boring", "story", "and", "电影", "很", "无聊"]
    texts = [" ".join(rng.choices(words, k=rng.randint(3, 15))) for _ in range(300)]
    letters = [chr(rng.choice([rng.randint(97, 122), rng.randint(0x4E00, 0x4E40)])) for _ in range(6000)]
    texts += ["".join(letters[i : i + 6]) for i in range(0, len(letters), 6)]
    return train_tokenizer(texts, VOCAB_SIZE)


@dataclasses.dataclass
class Tiny:
    """The weights and the tokenizer of the tiny classifier."""

    tokenizer: Tokenizer
    embedding: np.ndarray  # [V, D]
    kernel: np.ndarray  # [D, C]
    bias: np.ndarray  # [C]

    @classmethod
    def build(cls):
        rng = np.random.default_rng(0)
        shapes = (VOCAB_SIZE, 8), (8, len(LABELS)), (len(LABELS),)
        return cls(Tokenizer(train_tiny_tokenizer()), *(rng.normal(size=s).astype(np.float32) for s in shapes))

    def ids_model(self, **metadata):
        """Returns the `onnx.ModelProto` token_ids -> logits, probabilities; `metadata` overrides entries."""
        model = onnx.parser.parse_model(_IDS_GRAPH)
        for name in ("embedding", "kernel", "bias"):
            model.graph.initializer.append(onnx.numpy_helper.from_array(getattr(self, name), name))
        metadata = {
            "name": "tiny",
            "version": "3",
            "labels": json.dumps(LABELS),
            "max_length": str(MAX_LENGTH),
            "pad_id": "0",
            "tokenizer_sha256": self.tokenizer.sha256,
            **metadata,
        }
        onnx.helper.set_model_props(model, metadata)
        return model

    def write_version(self, directory, precisions=("float32", "int8"), **metadata):
        """Writes a version directory; every precision is the same float32 graph."""
        directory = Path(directory)
        (directory / contract.ONNX_DIR).mkdir(parents=True)
        for precision in precisions:
            onnx.save(self.ids_model(**metadata), directory / contract.ONNX_FILES[precision])
        (directory / contract.TOKENIZER_MODEL).write_bytes(self.tokenizer.model)
        contract.Manifest(
            name="tiny",
            version=3,
            created="2025-01-01T00:00:00Z",
            labels=LABELS,
            max_length=MAX_LENGTH,
            pad_id=0,
            files=contract.list_files(directory),
            metrics={},
            parity={},
            warnings=[],
            job={},
            data_fingerprint="",
            export_key="",
            packages={},
            source_revision="",
        ).write(directory)
        return directory

    def expected_logits(self, texts):
        """float64 [N, C] by plain NumPy, one text at a time, without padding."""
        means = []
        for row in self.tokenizer.encode(texts):
            vectors = self.embedding[row[:MAX_LENGTH]].astype(np.float64)  # [T, D]
            means.append(vectors.sum(axis=0) / max(len(vectors), 1))
        return np.array(means) @ self.kernel + self.bias

    def expected_probabilities(self, texts):
        """float64 [N, C]."""
        powers = np.exp(self.expected_logits(texts))
        return powers / powers.sum(axis=1, keepdims=True)
