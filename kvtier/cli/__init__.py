"""The kvtier command: one file per subcommand."""
