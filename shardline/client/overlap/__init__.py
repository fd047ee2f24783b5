"""Gradients that leave during the backward pass, and forward passes that wait layer by layer."""
