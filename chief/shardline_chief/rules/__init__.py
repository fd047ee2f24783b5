"""The chief's decisions, as pure functions of events and time."""
