{
    "env": "CartPole-v1",
    "seed": 1,
    "env_steps": 200192,
    "eval_episodes": 100,
    "mean_return": 500.0,
    "min_return": 500.0,
    "train_s": 39.31,
}
