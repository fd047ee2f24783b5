"""The worker's side: sessions, training steps, and the exchange with the servers."""
