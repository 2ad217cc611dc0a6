"""Options of a run: each is declared once, with default, rule and help text.

`RunOptions` (`run.py`) contains a section for each part of a run, such as `data` and `optimizer`.
The arguments of models are in `model.py`. No module in this folder imports JAX. Therefore `--help`
and errors in a config appear in less than a second.
"""
