"""What only a GPU can show. Written without one: these tests have not been run yet."""

import numpy as np
import onnxruntime as ort
import pytest

from pipeline.config import ModelConfig
from tests.serving.tiny import Tiny

TINY = ModelConfig(d_model=16, num_heads=2, d_ff=32, num_layers=2, dropout=0.0, head_dropout=0.0, max_length=16)


def _tensorflow_has_gpu():
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


@pytest.mark.gpu
def test_a_training_step_on_gpu_agrees_with_cpu():
    if not _tensorflow_has_gpu():
        pytest.skip("TensorFlow sees no GPU")
    import tensorflow as tf

    from pipeline.classifier import build_classifier
    from pipeline.config import TrainingConfig
    from pipeline.train_step import TrainStep

    tf.config.experimental.enable_tensor_float_32_execution(False)
    batch = np.array([[3, 4, 5, 0], [6, 0, 0, 0], [0, 0, 0, 0]], np.int32), np.array([0, 1, 2], np.int32)
    losses = {}
    for device in ("/CPU:0", "/GPU:0"):
        with tf.device(device):
            model = build_classifier(TINY, vocab_size=10, num_classes=3, seed=1)
            train_step = TrainStep(model, TrainingConfig(), np.ones(3))
            losses[device] = [train_step([batch], 1e-2)[0] for _ in range(10)]
    np.testing.assert_allclose(losses["/GPU:0"], losses["/CPU:0"], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_onnx_classifier_on_cuda_agrees_with_the_oracle(tmp_path):
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has no CUDA provider")
    from serving.onnx_classifier import OnnxClassifier

    tiny = Tiny.build()
    classifier = OnnxClassifier.load(tiny.write_version(tmp_path / "1"), providers=["CUDAExecutionProvider"])
    texts = ["a fine film", "", "dull"]
    np.testing.assert_allclose(
        classifier.probabilities(texts), tiny.expected_probabilities(texts), atol=1e-4, rtol=1e-4
    )
