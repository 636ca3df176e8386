"""What may be tried: plans, learning-rate rules, ranges, the study file and the values of the road.

Pure arithmetic and checked values. Nothing here knows torch, Ray, Optuna or SQL, so every other
package may speak of these types.
"""
