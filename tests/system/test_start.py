"""What a start waits for, and what it does not."""

import os
import subprocess
import sys

CREATE = """
import sys
import jax
import vit_jax

compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
vit_jax.create_model("ViT-Ti/16")
print(compiled.count("/jax/core/compile/backend_compile_duration"))
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_a_model_is_made_with_few_small_compilations_and_without_what_trains_it():
    process = subprocess.run(
        [sys.executable, "-c", CREATE],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    compiled, imported = process.stdout.splitlines()
    assert 0 < int(compiled) <= 16
    others = {"clu", "grain", "ml_collections", "orbax", "tensorflow", "tensorflow_datasets", "tensorstore"}
    assert not others & set(imported.split())
