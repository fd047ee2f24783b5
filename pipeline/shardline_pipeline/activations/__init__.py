"""Activations and gradients between workers that compute the stages of a pipeline."""
