"""A fork server: a process that has imported what others need, and forks them when it is asked to.

Nothing here knows what is imported. The actor that keeps one is `gyre.actors.forking.keeper.ForkServer`."""
