"""Writes docs/config.md and vit_jax/config_types.py: python docs/write_config.py"""

from pathlib import Path

from vit_jax.config_page import page, types
from vit_jax.shipped import PACKAGE

Path(__file__).with_name("config.md").write_text(page())
(PACKAGE / "config_types.py").write_text(types())
