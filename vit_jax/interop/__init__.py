"""Reads and writes other libraries' checkpoints: Google's npz, timm's and others' safetensors."""
