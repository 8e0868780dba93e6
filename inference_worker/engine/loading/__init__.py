"""Loading of a checkpoint's weights as tensors."""
