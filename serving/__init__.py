"""Publishing version directories and predicting from them. Importing it loads no TensorFlow."""
