"""Lane tcp: tensor bytes travel over sockets beside the calls."""
