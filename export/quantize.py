"""int8 by dynamic quantization: weights in 8 bits, activations quantized as they come."""

import logging

from onnxruntime.quantization import QuantType, quantize_dynamic

# Share of texts whose label must stay the same as in float32.
MIN_AGREEMENT = 0.99


def quantize_int8(source, target):
    """Writes the int8 form of an ONNX file, with the same inputs, outputs and metadata.

    Args:
        source: path of the float32 file.
        target: path to write.
    """
    # It logs advice about pre-processing on the root logger at every call.
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    try:
        quantize_dynamic(
            source,
            target,
            per_channel=True,
            # 7 bits of weight: with 8, CPUs without VNNI overflow int16 sums and answer differently.
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )
    finally:
        logging.getLogger().setLevel(level)
