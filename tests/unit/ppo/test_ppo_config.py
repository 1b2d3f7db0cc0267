"""PPOConfig: rounding, checks that say the fix, and a light import."""

from __future__ import annotations

import pytest
import tyro

from ppo.config import PPOConfig


def test_a_rollout_is_what_all_environments_do_between_updates() -> None:
    config = PPOConfig(num_env_steps=1000, num_processes=16, num_steps=32)
    assert (config.rollout_steps, config.num_updates, config.total_steps) == (512, 2, 1024)


def test_fewer_steps_than_a_rollout_still_make_one_update() -> None:
    assert PPOConfig(num_env_steps=1).num_updates == 1


@pytest.mark.parametrize(
    ("num_mini_batch", "advice"), [(5, "try 4 or 8"), (513, "try 512"), (3, "try 2 or 4"), (300, "try 256 or 512")]
)
def test_minibatches_that_do_not_divide_the_rollout_name_those_that_do(num_mini_batch: int, advice: str) -> None:
    with pytest.raises(ValueError, match=advice) as caught:
        PPOConfig(num_processes=16, num_steps=32, num_mini_batch=num_mini_batch)
    assert str(caught.value).startswith(f"num_mini_batch={num_mini_batch} must divide num_processes*num_steps=512")


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_env_steps": 0},
        {"num_processes": 0},
        {"num_steps": -1},
        {"ppo_epoch": 0},
        {"num_mini_batch": 0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"clip_param": -0.2},
        {"max_grad_norm": 0.0},
        {"gamma": 1.5},
        {"gae_lambda": -0.1},
        {"entropy_coef": -0.01},
        {"value_loss_coef": -1.0},
        {"target_kl": 0.0},
        {"hidden_sizes": ()},
        {"hidden_sizes": (64, 0)},
        {"seed": -1},
    ],
)
def test_a_value_that_cannot_work_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PPOConfig(**wrong)  # type: ignore[arg-type]


def test_the_other_families_names_set_the_same_fields() -> None:
    cleanrl = (
        "--total-timesteps 999 --num-envs 4 --update-epochs 3 --num-minibatches 2 --learning-rate 0.1 --no-anneal-lr"
    )
    cleanrl += " --clip-coef 0.1 --ent-coef 0.5 --vf-coef 0.25"
    ours = "--num-env-steps 999 --num-processes 4 --ppo-epoch 3 --num-mini-batch 2 --lr 0.1 --no-use-linear-lr-decay"
    ours += " --clip-param 0.1 --entropy-coef 0.5 --value-loss-coef 0.25"
    assert tyro.cli(PPOConfig, args=cleanrl.split()) == tyro.cli(PPOConfig, args=ours.split()) != PPOConfig()
