"""One training step of a worker: gradients into payloads, exchange, parameters back into the model."""
