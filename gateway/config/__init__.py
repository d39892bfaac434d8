"""The gateway's configuration: its model and its loader."""
