"""What every room shares: checkpoints, number formats, quantized tensors, recipes, manifests."""
