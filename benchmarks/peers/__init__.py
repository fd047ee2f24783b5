"""The rivals, each run by the python of its own virtual environment: nothing here may import Shardline."""
