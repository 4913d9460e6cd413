"""Llama weights on disk: Hugging Face files in and out, and conversion between layouts."""
