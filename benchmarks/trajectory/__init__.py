"""What it takes to build, draw from and pack trajectory trees, and how well what is shared stays together."""
