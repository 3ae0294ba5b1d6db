"""What moving bytes between processes costs, by each backend."""
