"""Training, whatever the model: data, optimizers, metrics and the loop."""
