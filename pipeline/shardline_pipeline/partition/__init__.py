"""Where to cut a model into stages: profiles of layers, what stages cost, and the search for the best ones."""
