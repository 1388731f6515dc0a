"""The ONNX graph that takes text: SentencePiece and padding in front of the token-id graph.

The SentencePiece step is an operator of ONNX Runtime Extensions: services register that library with
their session. Never load it in a process that has imported TensorFlow; the two crash together.
"""

import onnx
import onnx.compose
import onnx.helper
import onnx.parser

from pipeline.contract import PAD_ID, PROBABILITIES, TEXT, TOKEN_IDS

CUSTOM_DOMAIN = "ai.onnx.contrib"
_PREFIX = "tokenize/"

# SentencepieceTokenizer answers with the ids of all texts behind one another, and with B + 1 offsets:
# text i owns tokens[offsets[i]:offsets[i + 1]]. (The extension calls the second output instance_indices.)
# The rows are made dense by one Gather from [PAD, *tokens]: position 0 is what every unused cell reads.
# Concat before ReduceMax gives T >= 1 when all texts are empty, and also when there is no text at all.
_TEXT_TO_IDS = """
<ir_version: {ir_version}, opset_import: ["": {opset}, "{domain}": 1]>
text_to_ids (string[batch] {text}) => (int32[batch, length] {token_ids})
<
    int32[num_tokens] tokens, int64[num_offsets] offsets,
    int32[1] pad = {{{pad_id}}}, int64 max_length = {{{max_length}}},
    int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] minus_one = {{-1}}, int64[1] end = {{9223372036854775807}},
    int64 range_start = {{0}}, int64 range_step = {{1}},
    int64[1] no_sampling = {{0}}, float[1] alpha = {{0.0}}, bool[1] false = {{0}}
>
{{
    tokens, offsets = {domain}.SentencepieceTokenizer ({text}, no_sampling, alpha, false, false, false)

    starts = Slice (offsets, zero, minus_one)
    ends = Slice (offsets, one, end)
    full_lengths = Sub (ends, starts)
    lengths = Min (full_lengths, max_length)
    lengths_and_one = Concat <axis = 0> (lengths, one)
    longest = ReduceMax <keepdims = 0> (lengths_and_one)

    positions = Range (range_start, longest, range_step)
    lengths_column = Unsqueeze (lengths, one)
    token_valid = Less (positions, lengths_column)
    first = Add (starts, one)
    first_column = Unsqueeze (first, one)
    index = Add (first_column, positions)
    index_or_pad = Where (token_valid, index, zero)
    pad_and_tokens = Concat <axis = 0> (pad, tokens)
    {token_ids} = Gather (pad_and_tokens, index_or_pad)
}}
"""


def build_text_graph(ids_model, tokenizer_model, max_length):
    """Puts the tokenizer in front of a token-id graph.

    The graph pads to T = max(1, min(longest, max_length)) tokens and cuts longer texts at the end.

    Args:
        ids_model: `onnx.ModelProto` with input `token_ids` int32 [B, T] and output `probabilities`; unchanged.
        tokenizer_model: bytes of the SentencePiece model; they are stored inside the graph.
        max_length: longest row in tokens, at least 1.

    Returns:
        `onnx.ModelProto`: `text` string [B] -> `probabilities` float32 [B, C], with the opset, IR version,
        producer and metadata of `ids_model`. Running it needs ONNX Runtime Extensions.

    Raises:
        ValueError: `ids_model` lacks `token_ids`, `probabilities` or the standard opset, or max_length < 1.
    """
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1. Received: max_length={max_length}")
    inputs, outputs = ([v.name for v in values] for values in (ids_model.graph.input, ids_model.graph.output))
    opset = next((o.version for o in ids_model.opset_import if o.domain in ("", "ai.onnx")), None)
    if inputs != [TOKEN_IDS] or PROBABILITIES not in outputs or opset is None:
        raise ValueError(
            f"ids_model must have the one input {TOKEN_IDS!r}, an output {PROBABILITIES!r} and the standard "
            f"opset. Received: inputs={inputs}, outputs={outputs}, opset={opset}"
        )
    tokenizer = onnx.parser.parse_model(
        _TEXT_TO_IDS.format(
            ir_version=ids_model.ir_version,
            opset=opset,
            domain=CUSTOM_DOMAIN,
            text=TEXT,
            token_ids=TOKEN_IDS,
            max_length=max_length,
            pad_id=PAD_ID,
        )
    )
    node = next(n for n in tokenizer.graph.node if n.domain == CUSTOM_DOMAIN)
    node.attribute.append(onnx.helper.make_attribute("model", tokenizer_model))
    # Every inner name gets the prefix, so that none can meet a name of the ids graph.
    tokenizer = onnx.compose.add_prefix(tokenizer, _PREFIX, rename_inputs=False, rename_outputs=False)
    model = onnx.compose.merge_models(
        tokenizer,
        ids_model,
        io_map=[(TOKEN_IDS, TOKEN_IDS)],
        outputs=[PROBABILITIES],
        name=ids_model.graph.name,
        producer_name=ids_model.producer_name,
        producer_version=ids_model.producer_version,
    )
    opsets = {o.domain: o.version for o in model.opset_import}  # merge_models lists those of both graphs
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(*o) for o in opsets.items())
    onnx.checker.check_model(model, full_check=True)
    return model
