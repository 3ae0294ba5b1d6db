"""What it costs to publish weights and to pull them."""
