"""Train-and-deploy pipeline for text classifiers: data, model, training, evaluation."""
