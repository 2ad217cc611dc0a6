"""Tests of LAMB: it equals timm's `Lamb`, and rejects initial parameters that it cannot train."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.training.test_dino_optimizer import by_path, draw, settings, tree_of
from vit_jax.config import base_config
from vit_jax.errors import UserError
from vit_jax.parallel.mesh import make_mesh
from vit_jax.training.optimizer import make_optimizer
from vit_jax.training.program import make_program


@pytest.mark.parametrize("clip_norm", [1.0, 1e3])
@pytest.mark.parametrize("decay", ["kernels", "all"])
def test_updates_are_timms(torch, timm, clip_norm, decay):
    from timm.optim import Lamb

    steps, rate, weight_decay = 6, 4e-3, 0.05
    config = settings(name="lamb", decay=decay, clip_norm=clip_norm)
    optimizer = make_optimizer(config, lambda t: jnp.float32(rate), weight_decay=weight_decay)
    params = draw(0)
    parameters = {path: torch.nn.Parameter(torch.tensor(x)) for path, x in params.items()}
    decayed = [x for path, x in parameters.items() if decay == "all" or path.endswith("kernel")]
    others = [x for x in parameters.values() if all(x is not one for one in decayed)]
    groups = [
        dict(params=decayed, weight_decay=weight_decay),
        dict(params=others, weight_decay=0.0),
    ]
    theirs = Lamb(groups, lr=rate, eps=config.epsilon, max_grad_norm=clip_norm)

    ours = jax.tree.map(jnp.asarray, tree_of(params))
    state = optimizer.init(ours)
    for step in range(steps):
        gradients = draw(step + 1)
        changes, state = optimizer.update(tree_of(gradients), state, ours)
        ours = optax.apply_updates(ours, changes)
        for path, x in parameters.items():
            x.grad = torch.tensor(gradients[path])
        theirs.step()
    for path, x in by_path(ours).items():
        length = np.linalg.norm(params[path])
        assert np.linalg.norm(x - params[path]) > 1e-3 * min(1, length)
        np.testing.assert_allclose(x, parameters[path].detach().numpy(), rtol=0, atol=1e-6 * length)


def program_of(**values):
    config = base_config()
    config.model.update(dict(name="ViT-Ti/4", dim=16, depth=1, mlp_dim=32, heads=2))
    config.data.image_size = 8
    config.batch_size = 8
    config.optimizer.update(dict(name="lamb", warmup_steps=1))
    config.update_from_flattened_dict(values)
    return make_program(config, num_classes=5, steps=4, mesh=make_mesh(config.mesh))


def test_a_head_of_zeros_is_refused():
    with pytest.raises(UserError, match=r"params/head/kernel starts at zeros; .*head_std=0.02"):
        program_of().initial_state(0)


def test_a_random_head_has_the_configured_std_and_no_bias():
    params = program_of(**{"model.head_std": 0.5}).initial_state(0)["params"]
    assert np.std(params["head"]["kernel"]) == pytest.approx(0.5, rel=0.2)
    assert not np.any(params["head"]["bias"])


def test_low_rank_changes_may_start_at_zero_because_they_do_not_decay():
    values = {"finetune.train": "lora", "model.head_std": 0.5}
    program_of(**values).initial_state(0)
    with pytest.raises(UserError, match=r"extra/lora/.*/up starts at zeros"):
        program_of(**values, **{"optimizer.decay": "all"}).initial_state(0)
