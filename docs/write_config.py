"""Writes docs/config.md: python docs/write_config.py"""

from pathlib import Path

from vit_jax.config_page import page

Path(__file__).with_name("config.md").write_text(page())
