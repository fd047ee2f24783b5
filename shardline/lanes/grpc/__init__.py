"""Lane grpc: tensor bytes travel in the call's own stream."""
