"""The search space: batch plans, learning-rate rules, domains, the study file, and the types that describe a trial.

Pure arithmetic and validated values. Nothing here imports torch, Ray, Optuna or SQL, so every other package can use it.
"""
