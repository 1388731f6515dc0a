"""The SavedModel that TensorFlow Serving reads: token ids in, and text in with the tokenizer in the graph."""

import collections
from pathlib import Path

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from pipeline.contract import (
    LABEL,
    LOGITS,
    PAD_ID,
    PROBABILITIES,
    SAVED_MODEL,
    SERVING_SIGNATURE,
    TEXT,
    TOKEN_IDS,
    TOKEN_IDS_SIGNATURE,
)


def classify_function(model):
    """Returns a `tf.function`: token_ids int32 [B, T] -> {"logits", "probabilities"}, both float32 [B, C]."""

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32, TOKEN_IDS)])
    def classify(token_ids):
        logits = model(token_ids, training=False)
        return {LOGITS: logits, PROBABILITIES: model.probabilities(logits)}

    return classify


class _Servable(tf.Module):
    """Holds what the signatures use, so that it is saved with them."""

    def __init__(self, model, labels, tokenizer_model, max_length):
        super().__init__()
        self.weights_of_model = [v.value for v in model.weights]  # without the states of dropout
        self.classify = classify_function(model)
        self.classify_ids = self._checked(model.vocab_size)
        self.signatures_to_save = {TOKEN_IDS_SIGNATURE: self.classify_ids, SERVING_SIGNATURE: self.classify_ids}
        if tokenizer_model is not None:
            self._add_text(labels, tokenizer_model, max_length)

    def _checked(self, vocab_size):
        # Without it a negative id counts from the end of the table, and a GPU reads zeros beyond the end.
        message = f"token_ids must be >= 0 and < {vocab_size}, the vocabulary"

        @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32, TOKEN_IDS)])
        def classify_ids(token_ids):
            checks = [
                tf.debugging.assert_non_negative(token_ids, message),
                tf.debugging.assert_less(token_ids, vocab_size, message),
            ]
            with tf.control_dependencies(checks):  # before the table is read, which has a message of its own on a CPU
                token_ids = tf.identity(token_ids)
            return self.classify(token_ids)

        return classify_ids

    def _add_text(self, labels, tokenizer_model, max_length):
        import tensorflow_text  # registers operations; a model without text must not need them

        self.labels = tf.constant(labels, tf.string)
        self.tokenizer = tensorflow_text.SentencepieceTokenizer(model=tokenizer_model, out_type=tf.int32)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, TEXT)])
        def tokenize(text):
            text = tf.strings.regex_replace(text, r"\x00", " ")  # as pipeline.text does
            rows = self.tokenizer.tokenize(text)[:, :max_length]  # ragged [B, T]
            token_ids = rows.to_tensor(PAD_ID)
            # At least one position, as everywhere: a batch of empty texts has length 0 here.
            missing = tf.maximum(1 - tf.shape(token_ids)[1], 0)
            return tf.pad(token_ids, [[0, 0], [0, missing]], constant_values=PAD_ID)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, TEXT)])
        def classify_text(text):
            probabilities = self.classify(tokenize(text))[PROBABILITIES]
            return {LABEL: tf.gather(self.labels, tf.argmax(probabilities, axis=-1)), PROBABILITIES: probabilities}

        self.tokenize = tokenize
        self.classify_text = classify_text
        self.signatures_to_save[SERVING_SIGNATURE] = classify_text


def export_saved_model(model, directory, labels, tokenizer_model, max_length):
    """Writes `saved_model.pb`, `variables/` and `assets/` into `directory`; equal arguments give equal bytes.

    With a tokenizer, the object that `tf.saved_model.load` returns also has `tokenize`: text string [B] -> the
    token_ids int32 [B, T] that `serving_default` classifies. Each byte that is not UTF-8 counts as one unknown
    character (SentencePiece puts U+FFFD in its place, after normalizing); NUL counts as a blank.

    Args:
        model: a `CalibratedClassifier`.
        directory: where to write; exists.
        labels: C label strings in index order.
        tokenizer_model: bytes of the SentencePiece model, or None for a SavedModel without TF-Text operations, whose
            `serving_default` then takes token ids.
        max_length: longest text, in tokens.
    """
    servable = _Servable(model, labels, tokenizer_model, max_length)
    # A server computes no gradients; their functions would bear numbers that differ from export to export.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(servable, str(directory), servable.signatures_to_save, options)
    _make_stable(Path(directory))


def _make_stable(directory):
    """Removes what differs from export to export: TensorFlow's count of functions in their names, and a random UUID."""
    (directory / "fingerprint.pb").unlink()  # holds the UUID; no loader needs the file
    path = directory / SAVED_MODEL
    saved = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    (meta_graph,) = saved.meta_graphs
    library, objects = meta_graph.graph_def.library, meta_graph.object_graph_def
    names = _stable_names([f.signature.name for f in library.function])
    for function in library.function:
        function.signature.name = names[function.signature.name]
        for argument in function.arg_attr.values():
            if "_user_specified_name" in argument.attr and argument.attr["_user_specified_name"].s.isdigit():
                del argument.attr["_user_specified_name"]  # no user: the number of a captured tensor
    library.function.sort(key=lambda f: f.signature.name)
    nodes = [n for f in library.function for n in f.node_def] + list(meta_graph.graph_def.node)
    for node in nodes:
        node.attr.pop("_gradient_op_type", None)
        for attribute in node.attr.values():
            if attribute.HasField("func"):
                attribute.func.name = names[attribute.func.name]
    for node in objects.nodes:
        if node.HasField("function"):
            node.function.concrete_functions[:] = [names[n] for n in node.function.concrete_functions]
        if node.HasField("bare_concrete_function"):
            bare = node.bare_concrete_function
            bare.concrete_function_name = names[bare.concrete_function_name]
    concrete = {names[n]: f.SerializeToString() for n, f in objects.concrete_functions.items()}
    objects.concrete_functions.clear()
    for name, function in concrete.items():
        objects.concrete_functions[name].ParseFromString(function)
    path.write_bytes(saved.SerializeToString(deterministic=True))


def _stable_names(names):
    """Returns name -> name in which the number of all functions so far is one among those of its kind, from 0."""
    parts = sorted(((*name.rpartition("_")[::2], name) for name in names), key=lambda p: int(p[1]))
    numbers, stable = collections.Counter(), {}
    for kind, _, name in parts:
        stable[name] = f"{kind}_{numbers[kind]}"
        numbers[kind] += 1
    return stable
