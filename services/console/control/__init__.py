"""The services of a running run: what they do now, and what a person changes on them."""
