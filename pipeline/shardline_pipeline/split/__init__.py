"""Models of any form in stages: traced by torch.export, cut by torch.distributed.pipelining."""
