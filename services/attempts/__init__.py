"""What makes attempts at samples: takes them from the stream, and calls tools for them."""
