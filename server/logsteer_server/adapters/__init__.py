"""LoRA adapters that the server keeps."""
