"""From text to batches: tokenizing, token folders on disk, packing, mixing and loading."""
