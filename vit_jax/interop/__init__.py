"""Reads and writes checkpoints of other libraries: Google's npz files, safetensors of timm etc."""
