"""Reads and writes checkpoints of other libraries, such as Google's npz files and timm's files."""
