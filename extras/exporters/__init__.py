"""Settings for frameworks that few people export to: Accelerate, DeepSpeed, TRL, Axolotl, LLaMA-Factory."""
