"""The SavedModel that TensorFlow Serving reads: token ids in, and text in with the tokenizer in the graph."""

import tensorflow as tf

from pipeline.contract import (
    LABEL,
    LOGITS,
    PAD_ID,
    PROBABILITIES,
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
        return {LOGITS: logits, PROBABILITIES: tf.nn.softmax(logits)}

    return classify


class _Servable(tf.Module):
    """Holds what the signatures use, so that it is saved with them."""

    def __init__(self, model, labels, tokenizer_model, max_length):
        super().__init__()
        self.variables_of_model = [v.value for v in model.variables]
        self.classify = classify_function(model)
        self.classify_ids = self._checked(model.embedding.input_dim)
        self.signatures_to_save = {TOKEN_IDS_SIGNATURE: self.classify_ids, SERVING_SIGNATURE: self.classify_ids}
        if tokenizer_model is not None:
            self._add_text(labels, tokenizer_model, max_length)

    def _checked(self, vocab_size):
        # Without it a negative id counts from the end of the table, and a GPU reads zeros beyond the end.
        message = f"token_ids must be >= 0 and < {vocab_size}, the vocabulary"

        @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32, TOKEN_IDS)])
        def classify_ids(token_ids):
            tf.debugging.assert_non_negative(token_ids, message)
            tf.debugging.assert_less(token_ids, vocab_size, message)
            return self.classify(token_ids)

        return classify_ids

    def _add_text(self, labels, tokenizer_model, max_length):
        import tensorflow_text  # registers operations; a model without text must not need them

        self.labels = tf.constant(labels, tf.string)
        self.tokenizer = tensorflow_text.SentencepieceTokenizer(model=tokenizer_model, out_type=tf.int32)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, TEXT)])
        def classify_text(text):
            text = tf.strings.regex_replace(text, r"\x00", " ")  # as pipeline.text does
            rows = self.tokenizer.tokenize(text)[:, :max_length]  # ragged [B, T]
            token_ids = rows.to_tensor(PAD_ID)
            # At least one position, as everywhere: a batch of empty texts has length 0 here.
            missing = tf.maximum(1 - tf.shape(token_ids)[1], 0)
            token_ids = tf.pad(token_ids, [[0, 0], [0, missing]], constant_values=PAD_ID)
            probabilities = self.classify(token_ids)[PROBABILITIES]
            return {LABEL: tf.gather(self.labels, tf.argmax(probabilities, axis=-1)), PROBABILITIES: probabilities}

        self.classify_text = classify_text
        self.signatures_to_save[SERVING_SIGNATURE] = classify_text


def export_saved_model(model, directory, labels, tokenizer_model, max_length):
    """Writes `saved_model.pb`, `variables/` and `assets/` into `directory`.

    Args:
        model: a built `EncoderClassifier`.
        directory: where to write; exists.
        labels: C label strings in index order.
        tokenizer_model: bytes of the SentencePiece model, or None for a SavedModel without TF-Text operations, whose
            `serving_default` then takes token ids.
        max_length: longest text, in tokens.
    """
    servable = _Servable(model, labels, tokenizer_model, max_length)
    tf.saved_model.save(servable, str(directory), signatures=servable.signatures_to_save)
