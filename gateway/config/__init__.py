"""The gateway's configuration: its model, and how a file becomes one."""
