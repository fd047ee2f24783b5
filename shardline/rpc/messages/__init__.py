"""Values to protobuf messages and back; whatever comes from the network is checked here."""
