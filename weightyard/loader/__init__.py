"""The loader: tensors out of a yard. The only part, with the trainer, that knows torch."""
