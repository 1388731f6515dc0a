"""From a trained model to one verified version directory: SavedModel, ONNX graphs, manifest."""
