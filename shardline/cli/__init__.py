"""The `shardline` command and its subcommands."""
