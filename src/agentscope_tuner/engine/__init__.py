"""The embedded engine: models, sampler, learner, checkpoints."""
