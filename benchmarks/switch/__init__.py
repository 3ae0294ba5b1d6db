"""Role changes with live calls: how long each state takes, and whether anything is left behind."""
