"""The ONNX graph that takes text: SentencePiece and padding in front of the token-id graph.

The SentencePiece step is an operator of ONNX Runtime Extensions: services register that library with
their session. Never load it in a process that has imported TensorFlow; the two crash together.

How strings reach the graph:

- NUL counts as a blank, as everywhere. But some interfaces of ONNX Runtime end a string at NUL before the graph sees
  it: the C functions FillStringTensor and FillStringTensorElement and what is built on them, and in Python NumPy arrays
  of dtype "U". Arrays of dtype object, and GetResizedStringTensorElementBuffer, which takes a length, keep it.
- Each byte that is not UTF-8, which only the C interface can pass, counts as one unknown character (SentencePiece puts
  U+FFFD in its place, after normalizing). Python refuses a lone surrogate, and spells an object of type bytes as its
  repr: give str.
"""

import onnx
import onnx.compose
import onnx.helper
import onnx.parser

from pipeline.contract import PAD_ID, PROBABILITIES, TEXT, TOKEN_IDS

CUSTOM_DOMAIN = "ai.onnx.contrib"
_PREFIX = "tokenize/"

# The operators of the extension end a string at NUL, so that none may reach them. Only a batch that has one pays for
# its removal, text by text: a table of all texts' parts would be as wide as the text with the most of them.
_NUL_TO_BLANK = """
    without_nul = RegexFullMatch ({text})
    without_nul_int = Cast <to = 6> (without_nul)
    all_without_nul_int = ReduceMin <keepdims = 0> (without_nul_int)
    all_without_nul = Cast <to = 9> (all_without_nul_int)
    clean = If (all_without_nul) <
        then_branch = unchanged () => (string[batch] same) {{ same = Identity ({text}) }},
        else_branch = replaced () => (string[batch] joined_texts)
        {{
            count = Size ({text})
            joined_texts = Loop (count, true) <
                body = each (int64 i, bool going_on) => (bool go_on, string joined)
                {{
                    go_on = Identity (going_on)
                    i_row = Unsqueeze (i, zero)
                    one_text = Gather ({text}, i_row)
                    parts, num_parts = StringSplit (one_text)
                    joined_row = {domain}.StringJoin (parts, blank, one)
                    joined = Squeeze (joined_row)
                }}
            >
        }}
    >
"""

# SentencepieceTokenizer answers with the ids of all texts behind one another, and with B + 1 offsets:
# text i owns tokens[offsets[i]:offsets[i + 1]]. (The extension calls the second output instance_indices.)
# The rows are made dense by one Gather from [PAD, *tokens]: position 0 is what every unused cell reads.
# Concat before ReduceMax gives T >= 1 when all texts are empty, and also when there is no text at all.
_TEXT_TO_IDS = (
    """
<ir_version: {ir_version}, opset_import: ["": {opset}, "{domain}": 1]>
text_to_ids (string[batch] {text}) => (int32[batch, length] {token_ids})
<
    int32[num_tokens] tokens, int64[num_offsets] offsets,
    int32[1] pad = {{{pad_id}}}, int64 max_length = {{{max_length}}},
    int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] minus_one = {{-1}}, int64[1] end = {{9223372036854775807}},
    int64 range_start = {{0}}, int64 range_step = {{1}},
    int64[1] no_sampling = {{0}}, float[1] alpha = {{0.0}}, bool[1] false = {{0}},
    bool true = {{1}}, string[1] blank = {{" "}}
>
{{"""
    + _NUL_TO_BLANK
    + """
    tokens, offsets = {domain}.SentencepieceTokenizer (clean, no_sampling, alpha, false, false, false)

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
)


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
    unspelled = {  # attributes that the parser has no spelling for
        "SentencepieceTokenizer": ("model", tokenizer_model),
        "RegexFullMatch": ("pattern", r"[^\x00]*"),
        "StringSplit": ("delimiter", b"\0"),
    }
    for graph in _all_graphs(tokenizer.graph):
        for node in graph.node:
            if node.op_type in unspelled:
                node.attribute.append(onnx.helper.make_attribute(*unspelled[node.op_type]))
        _rename(graph)
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


def _all_graphs(graph):
    """Yields a graph and the graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all_graphs(attribute.g)


def _rename(graph):
    """Gives every inner name the prefix, so that none can meet a name of the ids graph.

    `onnx.compose.add_prefix` forgets that the graphs inside nodes read values from outside.
    """

    def prefixed(name):
        return name if name in ("", TEXT, TOKEN_IDS) else _PREFIX + name

    for node in graph.node:
        node.input[:] = [prefixed(name) for name in node.input]
        node.output[:] = [prefixed(name) for name in node.output]
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = prefixed(value.name)
