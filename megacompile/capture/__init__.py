"""Capture: a module and a batch become one flat ``torch.fx`` graph of the loss."""
