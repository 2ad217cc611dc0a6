"""Checkpoints of other libraries, in and out: Google's npz, timm's and Transformers'
safetensors.
"""
