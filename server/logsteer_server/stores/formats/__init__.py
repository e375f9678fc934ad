"""Formats of uploaded files: vectors in several, tensors as safetensors."""
