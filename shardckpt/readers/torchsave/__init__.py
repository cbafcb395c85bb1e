"""Files of `torch.save`."""
