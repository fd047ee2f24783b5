"""The parameter server: keeps shards of the parameters and applies every update."""
